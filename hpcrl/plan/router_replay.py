"""The conflicts of `train.router_replay`: engines report experts, and the trainer replays them. Pure.

find_replay_conflict   the reason why a recipe cannot have it, with a fix
"""

from hpcrl.config.recipe import Recipe
from hpcrl.hardware.architecture import REPLAY_FAMILIES, read_architecture


def find_replay_conflict(recipe: Recipe) -> str | None:
    """Return why `train.router_replay` cannot act in a recipe that has it, with a fix; None if it can."""
    found = _find_model_conflict(recipe) or _find_engine_conflict(recipe)
    return f"train.router_replay = true {found}" if found else None


def _find_model_conflict(recipe: Recipe) -> str | None:
    fields = recipe.model.config
    if recipe.model.tiny is not None or (fields and not read_architecture(fields).num_experts):
        return "cannot act: the model has no experts; remove it"
    family = fields.get("model_type")
    if fields and family not in REPLAY_FAMILIES:
        return (
            f'is not known to be right for a model of type "{family}": only for {", ".join(sorted(REPLAY_FAMILIES))}; '
            "remove it"
        )
    return None


def _find_engine_conflict(recipe: Recipe) -> str | None:
    """Return what keeps engines from reporting experts; those of vLLM are the reasons that vLLM 0.32 gives."""
    engine = recipe.engine
    if engine.backend == "sim":
        return 'cannot act with engine.backend = "sim", which has no model: remove it'
    if engine.backend == "embedded":
        return None
    if not recipe.role_resources("decode").gpus_per_worker:
        return (
            'needs GPUs with engine.backend = "vllm", and resources.decode.gpus_per_worker = 0: vLLM reports experts '
            'with its Model Runner V2 alone, which needs Triton; set backend = "embedded", or give engines GPUs'
        )
    if engine.pipeline_parallel > 1:
        return (
            f"with engine.pipeline_parallel = {engine.pipeline_parallel}: vLLM reports no experts then; set it to 1, "
            "and give an engine's stages as tensor parallel GPUs"
        )
    prefill, router = recipe.resources.prefill.num_workers, recipe.router
    # Where it is left open, plans have one pool of engines then, unless workers are to take turns at both roles.
    if recipe.has_prefill and (prefill != "auto" or router.switch_roles or router.sizing == "auto"):
        return (
            'with engine.backend = "vllm" and prefill workers: vLLM does not hand experts over with KV; set '
            "resources.prefill.num_workers = 0, for one pool of engines"
        )
    return None
