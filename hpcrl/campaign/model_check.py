"""Check a recipe's model without torch: `python -m hpcrl.campaign.model_check < recipe.json`.

    check_model      raise ConfigError for what would refuse the model only in the job
    main             the same as a command: the refusal is on standard output
    MISSING_PACKAGE  the exit code if a package is missing here, whose name is then on standard output

It is a separate process with limits on time and memory, since a chat template is a program that may run without end.
"""

import ast
import contextlib
import resource
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcrl.config.recipe import DomainConfig, EngineConfig, JudgeConfig, ModelConfig, Recipe
from hpcrl.config.toml import suggest_name
from hpcrl.config.user_code import load_code
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.hardware.architecture import QUANTISED_ADVICE, read_rope_factor
from hpcrl.models.weight_headers import check_served_files, check_weight_files, check_weight_names
from hpcrl.plan.checks import check_kv, check_lengths
from hpcrl.system.files import is_directory, is_file, read_json

if TYPE_CHECKING:
    from hpcrl.models.model_config import ModelDescription

MISSING_PACKAGE = 3
MAX_MEMORY_BYTES = 4 << 30
SET_VARIABLES = ("messages", "tools", "add_generation_prompt")
"""The variables of chat templates that no recipe sets."""
CAUSAL_KINDS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""The table of transformers with the architecture of each `model_type`."""
GENERATING_MODELS = ("ForCausalLM", "ForConditionalGeneration")
"""The ends of the names of architectures that generate text."""


def main() -> int:
    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        check_model(recipe)
    except HpcrlError as error:
        sys.stdout.write(str(error))
        return 2
    except ModuleNotFoundError as error:
        sys.stdout.write(str(error.name))
        return MISSING_PACKAGE
    return 0


def check_model(recipe: Recipe) -> None:
    """Check architecture, context length and chat template; those of a tiny model are known to be good."""
    from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
    from hpcrl.models.jinja_template import list_variables
    from hpcrl.models.model_config import read_context_length

    for setting, directory in recipe.further_models.items():
        _check_further_model(recipe, setting, Path(directory))
    for name, judge in recipe.judge.items():
        _check_judge(f"judge.{name}", judge)
    if recipe.teaching_judge is not None:
        _check_teaching_judge(recipe, recipe.teaching_judge)
    if recipe.model.path is None:
        if recipe.model.chat_template is not None:
            raise ConfigError("model.chat_template needs model.path: a tiny model has a template already")
        return
    path, max_model_len = Path(recipe.model.path), recipe.engine.max_model_len
    fields = _read_config("model.path", path).fields
    context_length = read_context_length(path, max_model_len=None if _knows_context(fields) else max_model_len)
    check_lengths(recipe, context_length * read_rope_factor(fields))
    _check_architecture(recipe, fields)
    if recipe.has_rollouts:
        check_kv(recipe.engine, fields, prefix="")
    template = load_chat_template(path, recipe.model)
    _check_template_kwargs(recipe.model.chat_template_kwargs, list_variables(template.text), source=template.source)
    try:
        load_chat_layout(path, recipe.model)
    except ConfigError:
        if not all(map(_may_be_program, recipe.domains.values())):
            raise


def reads_weight_files(engine: EngineConfig) -> bool:
    """Return whether a judge's engine reads the files of its model: it may have made-up weights, or a named loader."""
    names_loader = any(argument.startswith(("--load-format", "--load_format")) for argument in engine.vllm_args)
    return engine.backend == "embedded" or (engine.backend == "vllm" and not names_loader)


def explain_missing_config(setting: str, path: str) -> str:
    """Explain that a model directory lacks its first file."""
    place = Path(path)
    why = "it has no config.json"
    if is_file(place):
        why = f"it is a file: give its directory, {str(place.parent)!r}"
    elif not is_directory(place):
        why += ", and does not exist"
    return f"{setting} = {path!r} is not a model directory: {why}"


def _read_config(setting: str, path: Path) -> "ModelDescription":
    from hpcrl.models.model_config import read_model_config

    if not (path / "config.json").is_file():
        raise ConfigError(explain_missing_config(setting, str(path)))
    try:
        return read_model_config(path / "config.json")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{setting}: {path / 'config.json'} is not a model's configuration: {error}") from error


def _check_template_kwargs(
    kwargs: Mapping[str, Any], variables: list[str], *, source: Path, table: str = "model"
) -> None:
    """Raise ConfigError for a variable that hpcrl sets itself, or that the template never reads."""
    known = [name for name in variables if name not in SET_VARIABLES and not name.endswith("_token")]
    for name in kwargs:
        if name in SET_VARIABLES:
            raise ConfigError(f"{table}.chat_template_kwargs.{name}: each conversation has its own {name}: remove it")
        if name not in variables:
            raise ConfigError(
                f"{table}.chat_template_kwargs.{name}: the chat template of {source} never reads it: "
                f"{suggest_name(name, known)}it reads {', '.join(known) or 'no variable that can be set'}"
            )


def _knows_context(fields: Mapping[str, Any]) -> bool:
    return fields.get("max_position_embeddings") is not None


def _check_further_model(recipe: Recipe, setting: str, path: Path) -> None:
    """Check that a teacher, or the model of a node, has the tokens of the policy, and its number of rows for them."""
    from hpcrl.models.model_config import read_context_length, read_vocabulary

    description = _read_config(setting, path)
    what, (own, taught) = f"{setting} = {str(path)!r}", _read_tokens("model", recipe.model)
    _check_same_tokens(what, read_vocabulary(path), own, taught)
    if setting.startswith("judge."):
        return  # its engines give the log-probs of sampled tokens alone
    _check_loading(setting, path)
    policy = recipe.model.path
    size = description.vocabulary_size
    wanted = len(taught) if policy is None else _read_config("model.path", Path(policy)).vocabulary_size
    if size != wanted:
        raise ConfigError(
            f"{what} has the tokens of {own} and vocab_size = {size} in its config.json, the "
            f"policy's is {wanted}: the trainer compares distributions, so choose a model with the same vocab_size"
        )
    if not _knows_context(description.fields):
        return
    readable = read_context_length(path, max_model_len=None) * read_rope_factor(description.fields)
    limit = _read_limit(recipe.model, recipe.engine)
    if readable < limit:
        raise ConfigError(
            f"{what} reads {readable:.0f} tokens, by its config.json, and trajectories may have {limit}: set "
            f"engine.max_model_len to {readable:.0f} or less, or choose a model with a longer context"
        )


def _read_tokens(table: str, model: ModelConfig) -> tuple[str, dict[str, int]]:
    """Return the setting of a model, and the ids of its tokens."""
    from hpcrl.models.model_config import read_vocabulary
    from hpcrl.models.tiny_vocabulary import make_tiny_vocabulary

    if model.path is None:
        return f"{table}.tiny", make_tiny_vocabulary()
    return f"{table}.path", read_vocabulary(Path(model.path))


def _check_same_tokens(what: str, known: dict[str, int], own: str, taught: dict[str, int]) -> None:
    """Raise ConfigError unless a teacher has the tokens of the model with the same ids."""
    different = [token for token, number in taught.items() if known.get(token) != number]
    if different or len(taught) != len(known):
        example = min(different or known.keys() - taught.keys(), key=lambda token: (len(token), token))
        raise ConfigError(
            f"{what} has another vocabulary than {own} ({len(known)} and {len(taught)} "
            f"tokens; {example!r} is {known.get(example)} and {taught.get(example)}): it scores the model's tokens, "
            "so choose one of the same family"
        )


def _check_teaching_judge(recipe: Recipe, judge: JudgeConfig) -> None:
    """Check that the engines of a teacher have the tokens of a tiny model, and read all that the policy generates."""
    table = f"judge.{recipe.teacher_name}"
    if judge.path is None:
        name, known = _read_tokens(table, judge)
        _check_same_tokens(name, known, *_read_tokens("model", recipe.model))
    limit, readable = _read_limit(recipe.model, recipe.engine), _read_limit(judge, judge.engine)
    needed = limit + (judge.engine.backend == "vllm")  # it generates a token besides
    if readable < needed:
        raise ConfigError(
            f"teacher.judge = {recipe.teacher_name!r} reads {readable} tokens ({table}), and trajectories may have "
            f"{limit}: set engine.max_model_len to {limit - needed + readable} or less, or raise "
            f"{table}.engine.max_model_len"
        )


def _read_limit(model: ModelConfig, engine: EngineConfig) -> int:
    """Return the tokens that prompt and answer may have together."""
    from hpcrl.models.model_config import read_context_length

    if model.tiny is not None:
        return min(model.tiny.context_length, engine.max_model_len or model.tiny.context_length)
    return read_context_length(Path(model.path or ""), max_model_len=engine.max_model_len)


def _check_judge(table: str, judge: JudgeConfig) -> None:
    """Check a judge's model; a reward model, which generates nothing, is for vLLM only."""
    from hpcrl.models.chat_layout import load_chat_template
    from hpcrl.models.jinja_template import list_variables

    if judge.path is None:
        if judge.chat_template is not None:
            raise ConfigError(f"{table}.chat_template needs {table}.path: a tiny model has a template already")
        return
    path = Path(judge.path)
    fields = _read_config(f"{table}.path", path).fields
    names = fields.get("architectures") or []
    generates = not names or any(str(name).endswith(GENERATING_MODELS) for name in names)
    if not generates and judge.engine.backend != "vllm":
        raise ConfigError(
            f"{table}.path = {judge.path!r} is a {', '.join(map(str, names))}, which generates no text: set "
            f'{table}.engine.backend = "vllm", which serves reward models, or choose a model whose architecture ends '
            f"in {' or '.join(GENERATING_MODELS)}"
        )
    if judge.engine.backend == "vllm" and reads_weight_files(judge.engine):
        check_served_files(f"{table}.path", path)
    elif judge.engine.backend == "embedded":
        check_kv(judge.engine, fields, prefix=f"{table}.")
        check_weight_files(f"{table}.path", path)
        check_weight_names(f"{table}.path", path, fields)
    if generates and judge.engine.backend != "vllm":
        template = load_chat_template(path, judge)
        _check_template_kwargs(
            judge.chat_template_kwargs, list_variables(template.text), source=template.source, table=table
        )


def _may_be_program(domain: DomainConfig) -> bool:
    """Return whether a domain's environment calls the model itself, which needs no layout of turns.

    True for one that cannot be loaded here, which the check of the recipe's code refuses. Only where a layout is
    missing is the environment's module imported.
    """
    if domain.python is not None:
        return False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return callable(getattr(load_code(domain.env, what="env"), "run", None))
    except ConfigError:
        return True


def _check_loading(setting: str, path: Path) -> None:
    """Check that transformers loads the model as a causal language model, from weights that can be trained."""
    check_weight_files(setting, path)
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(
            f"{setting} = {str(path)!r} has quantised weights (quantization_config in its config.json: {method}): "
            f"{QUANTISED_ADVICE}"
        )
    check_weight_names(setting, path, config)
    kind, known = config.get("model_type"), _list_causal_kinds()
    if known and kind not in known:
        raise ConfigError(
            f"{setting} = {str(path)!r} has model_type = {kind!r}, which transformers {version('transformers')} does "
            "not load as a causal language model: save its language model alone, or choose another"
        )


@cache
def _list_causal_kinds() -> frozenset[str]:
    """List the values of `model_type` that transformers loads as a causal language model.

    They are read from its source: the module itself imports torch. Without the source all are accepted.
    """
    found = find_spec("transformers")
    source = Path(found.origin or "").parent / "models" / "auto" / "modeling_auto.py" if found else Path()
    if not source.is_file():
        return frozenset()
    for statement in ast.parse(source.read_text()).body:
        if ast.unparse(statement).startswith(CAUSAL_KINDS):
            pairs = [node.elts for node in ast.walk(statement) if isinstance(node, ast.Tuple)]
            return frozenset(str(ast.literal_eval(kind)) for kind, *_ in pairs)
    return frozenset()


def _check_architecture(recipe: Recipe, fields: dict[str, Any]) -> None:
    names = fields.get("architectures") or []
    if names and not any(str(name).endswith(GENERATING_MODELS) for name in names):
        raise ConfigError(
            f"model.path = {recipe.model.path!r} is a {', '.join(map(str, names))}, which generates no text: choose a "
            f"model whose architecture ends in {' or '.join(GENERATING_MODELS)}"
        )
    _check_loading("model.path", Path(recipe.model.path or ""))
    if recipe.train.trainer != "megatron":
        return
    from hpcrl.trainers.megatron.weight_names import check_parallelism, read_model_dims

    try:
        dims = read_model_dims(fields)
    except KeyError as error:
        raise ConfigError(f"{recipe.model.path}/config.json lacks the field {error}") from error
    check_parallelism(dims, recipe.train.degrees)


if __name__ == "__main__":
    sys.exit(main())
