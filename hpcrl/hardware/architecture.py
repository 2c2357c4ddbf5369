"""The architecture of a language model: its sizes, read from a config.json, and its weights by kind. Pure.

    ModelArchitecture    the sizes, with the number of weights of each kind
    read_architecture    from the fields of a config.json
    select_fields        those of them that a plan needs
    guess_architecture   of a dense model, from its number of weights alone
    read_max_context, read_rope_factor    the tokens of its context, and by how much an engine may stretch it
    find_parallel_conflict    whether the ranks of trainer "megatron" can divide it
    find_context_conflict, count_kv_repeats    whether ranks can divide the positions of a row, and how its heads then

The counts equal those of transformers for the families in KNOWN_FAMILIES; those of any other are an estimate.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from hpcrl.hardware.degrees import ParallelDegrees

KNOWN_FAMILIES = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
        *("glm", "glm4", "glm4_moe", "gemma", "gemma2", "gemma3_text"),
    }
)
"""Values of `model_type` whose weights are counted exactly."""
CONTEXT_FAMILIES = KNOWN_FAMILIES - {"gemma2", "gemma3_text"}
"""The families whose rows ranks can divide: only attention sees other positions, and it is plain softmax attention."""
REPLAY_FAMILIES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe"})
"""The families in whose routers another choice of experts is known to be replayed right."""
MEGATRON_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
"""The families that trainer "megatron" supports."""
QUANTISED_ADVICE = "train on the model's bf16 or fp32 weights, and quantise in the engines"
"""The end of a refusal of a model whose stored weights are quantised."""
_LENGTH_ROPES = ("dynamic", "longrope")
"""Rotations whose angles depend on how long the row is."""
_WINDOW_FAMILIES = frozenset({"mistral", "mixtral", "gemma2", "gemma3_text"})
"""The families whose layers have a window if sliding_window is set; others have it with use_sliding_window."""
_TEXT_PARTS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""The family of the language model within a model that also reads images."""
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
    "qwen2_moe": {"qkv_bias": True},
    "glm": {"attention_bias": True, "head_dim": 128},
    "glm4": {"attention_bias": True, "head_dim": 128},
    "glm4_moe": {"head_dim": 128},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
}
"""Fields that published config.json files of a family leave out, because they have transformers' default value."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that may hold the number of experts."""
_FIELDS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias"),
    *("use_qk_norm", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "num_experts_per_tok"),
    *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "max_position_embeddings", *_EXPERT_COUNTS),
    *("dtype", "torch_dtype", "rope_parameters", "rope_scaling", "quantization_config"),
    *("sliding_window", "use_sliding_window"),
)
"""The fields that a plan needs."""
_COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    "intermediate_size",
)
"""Fields that are 1 at least."""
_COUNTS_OR_ZERO = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "num_experts_per_tok"),
    *("first_k_dense_replace", "decoder_sparse_step", "q_lora_rank", "kv_lora_rank", *_EXPERT_COUNTS),
)
"""Fields that are 0 where a model has nothing of the kind."""
_GUESSED_VOCABULARY = 150_000
_STRETCHED_ROPES = ("yarn", "linear", "dynamic")


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a causal language model. A layer's MLP is gated; experts are such MLPs too."""

    family: str
    num_layers: int
    hidden_size: int
    vocabulary_size: int
    is_tied: bool
    """True if the output layer is the embedding."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The size of a query and of a key, per head."""
    value_dim: int
    """The size of a value, per head."""
    query_rank: int = 0
    """With compressed attention (MLA): the size of a compressed query; 0: queries are not compressed."""
    kv_rank: int = 0
    """With compressed attention: the size of compressed keys and values; 0: plain attention."""
    rope_dim: int = 0
    """With compressed attention: the size of the key's part that carries the position, shared by all heads."""
    has_query_norm: bool = False
    """True if queries and keys are normalized."""
    num_layer_norms: int = 2
    num_biases: int = 0
    """Biases of a layer."""
    dense_inner: int = 0
    """The inner size of the MLP of a layer without experts."""
    dense_layers: tuple[int, ...]
    """The layers without experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """The inner size of the part of a layer with experts that every token uses; 0: there is none."""
    has_shared_gate: bool = False
    has_precise_router: bool = False
    """True if routers compute in float32, whatever the precision of the model is."""

    @property
    def num_dense_layers(self) -> int:
        return len(self.dense_layers)

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def choice_bytes(self) -> int:
        """The bytes of a token's experts in a record: one for each, or two where there are more than 255."""
        return self.num_expert_layers * self.experts_per_token * (1 if self.num_experts <= 255 else 2)

    @property
    def embedding_params(self) -> int:
        return self.vocabulary_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """The weights of the output layer that are not the embedding's."""
        return 0 if self.is_tied else self.embedding_params

    @property
    def attention_params(self) -> int:
        """The weights of the attention of one layer, with its norms and biases."""
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        output = self.num_heads * self.value_dim * hidden
        if self.kv_rank:
            query = queries * hidden
            if self.query_rank:
                query = self.query_rank * (hidden + queries + 1)
            plain_dim = self.head_dim - self.rope_dim
            keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank
            values = self.kv_rank * self.num_heads * (plain_dim + self.value_dim)
            return query + keys + values + output + self.num_biases
        keys = self.num_kv_heads * self.head_dim * hidden
        values = self.num_kv_heads * self.value_dim * hidden
        return queries * hidden + keys + values + output + self.num_biases + 2 * self.head_dim * self.has_query_norm

    @property
    def dense_mlp_params(self) -> int:
        """The weights of the MLP of a layer without experts."""
        return 3 * self.hidden_size * self.dense_inner

    @property
    def routed_params(self) -> int:
        """The weights of all experts of a layer that has them."""
        return 3 * self.hidden_size * self.expert_inner * self.num_experts

    @property
    def shared_params(self) -> int:
        """The weights of a layer with experts for its router and for the MLP that all tokens use."""
        hidden = self.hidden_size
        return hidden * self.num_experts + 3 * hidden * self.shared_inner + hidden * self.has_shared_gate

    @property
    def norm_params(self) -> int:
        """The weights of the norms of one layer around attention and MLP."""
        return self.num_layer_norms * self.hidden_size

    @property
    def num_expert_params(self) -> int:
        """The weights of all experts of all layers, of which a token uses a few."""
        return self.num_expert_layers * self.routed_params

    @property
    def num_params(self) -> int:
        layers = self.num_layers * (self.attention_params + self.norm_params)
        layers += self.num_dense_layers * self.dense_mlp_params + self.num_expert_layers * self.shared_params
        return layers + self.num_expert_params + self.embedding_params + self.head_params + self.hidden_size

    @property
    def largest_layer_params(self) -> int:
        """The weights of the largest layer."""
        with_experts = self.routed_params + self.shared_params if self.num_expert_layers else 0
        dense = self.dense_mlp_params if self.num_dense_layers else 0
        return self.attention_params + self.norm_params + max(with_experts, dense)

    @property
    def kv_values_per_token(self) -> int:
        """The numbers that an engine keeps of a token, over all layers."""
        if self.kv_rank:
            return self.num_layers * (self.kv_rank + self.rope_dim)
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.value_dim)


def select_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that a plan needs; those of a nested `text_config` take precedence."""
    fields = {**config, **(config.get("text_config") or {})}
    return {name: fields[name] for name in _FIELDS if fields.get(name) is not None}


def read_max_context(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a context may have by the fields of a config.json; None if it is not there."""
    length = select_fields(config).get("max_position_embeddings")
    return round(length * read_rope_factor(config)) if isinstance(length, int) else None


def read_rope_factor(config: Mapping[str, Any]) -> float:
    """Return by how much an engine may stretch the context; other forms count it in max_position_embeddings."""
    fields = select_fields(config)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or (rope.get("rope_type") or rope.get("type")) not in _STRETCHED_ROPES:
        return 1.0
    factor, trained = float(rope.get("factor") or 1.0), rope.get("original_max_position_embeddings")
    if isinstance(trained, int):  # some models count the factor in max_position_embeddings already, others do not
        factor *= trained / fields.get("max_position_embeddings", trained)
    return max(factor, 1.0)


def find_context_conflict(config: Mapping[str, Any], *, size: int) -> str | None:
    """Return why this many ranks cannot divide the positions of a row, with a fix; None if they can."""
    fields, setting = select_fields(config), f"train.context_parallel = {size}"
    family = str(fields.get("model_type", ""))
    if _TEXT_PARTS.get(family, family) not in CONTEXT_FAMILIES:
        return f'{setting} is not known to be right for a model of type "{family}": set it to 1'
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, Mapping) else None
    if kind in _LENGTH_ROPES:
        return (
            f'{setting} with a model whose positions are of type "{kind}", which depend on the length of the whole '
            "row: set it to 1, or rope_parameters in config.json to another type"
        )
    num_heads = read_architecture(config).num_heads
    if num_heads % size:
        fitting = max(each for each in range(1, size) if num_heads % each == 0)
        return f"{setting} does not divide the {num_heads} attention heads of the model: set it to {fitting}"
    return None


def find_window(config: Mapping[str, Any]) -> int:
    """Return the positions that layers with a sliding window attend to; 0 if a model has no such layers."""
    fields = select_fields(config)
    family = str(fields.get("model_type", ""))
    has_window = fields.get("use_sliding_window", _TEXT_PARTS.get(family, family) in _WINDOW_FAMILIES)
    return int(fields.get("sliding_window", 0)) if has_window else 0


def find_parallel_conflict(shape: ModelArchitecture, degrees: ParallelDegrees, *, num_chunks: int = 1) -> str | None:
    """Return why the ranks of trainer "megatron" cannot divide a model, with a fix; None if they can."""
    num_tp, num_pp, num_ep, num_cp = degrees.tensor, degrees.pipeline, degrees.expert, degrees.context
    groups = [] if shape.kv_rank else [("query groups", shape.num_kv_heads)]
    inner = [("ffn rows", shape.dense_inner)] if shape.num_dense_layers else []
    shared = [("rows of shared experts", shape.shared_inner)] if shape.shared_inner else []
    for what, size in (*groups, ("attention heads", shape.num_heads), *inner, *shared):
        if size % num_tp:
            return f"train.tensor_parallel = {num_tp} does not divide the model's {size} {what}: choose a divisor"
    num_heads = shape.num_heads // num_tp
    if num_heads % num_cp:
        of_a_rank = f" of a rank with train.tensor_parallel = {num_tp}" if num_tp > 1 else " of the model"
        return (
            f"train.context_parallel = {num_cp} does not divide the {num_heads} attention heads{of_a_rank}: choose a "
            "divisor"
        )
    if num_pp > shape.num_layers:
        return (
            f"train.pipeline_parallel = {num_pp} are more stages than the model's {shape.num_layers} layers: lower it"
        )
    if num_chunks > 1 and num_pp == 1:
        return f"train.pipeline_chunks = {num_chunks} needs stages: set train.pipeline_parallel = 2 or more"
    if num_pp * num_chunks > shape.num_layers:
        return (
            f"train.pipeline_chunks = {num_chunks} on each of {num_pp} stages are more parts than the model's "
            f"{shape.num_layers} layers: lower it"
        )
    if num_ep > 1 and not shape.num_expert_layers:
        return f"train.expert_parallel = {num_ep}, and the model has no experts: set it to 1"
    if shape.num_experts % num_ep:
        return (
            f"train.expert_parallel = {num_ep} does not divide the model's {shape.num_experts} experts: "
            "choose a divisor"
        )
    return None


def count_kv_repeats(num_heads: int, num_kv_heads: int, *, size: int) -> int:
    """Return how often keys and values are repeated, so that this many ranks can divide their heads.

    They are repeated for each query head where nothing less does, as with heads that are a guess.
    """
    most = max(num_heads // num_kv_heads, 1)
    fitting = (num for num in range(1, most + 1) if most % num == 0 and num_kv_heads * num % size == 0)
    return next(fitting, most)


def read_architecture(config: Mapping[str, Any]) -> ModelArchitecture:
    """Read the sizes from the fields of a config.json.

    KeyError if one that cannot be left out is absent, ValueError if one is not what it should be.
    """
    given = select_fields(config)
    family = given.get("model_type", "")
    if not isinstance(family, str):
        raise ValueError(f"model_type = {family!r} is not the name of a family")
    family = _TEXT_PARTS.get(family, family)
    fields = _FAMILY_DEFAULTS.get(family, {}) | given
    for name in _COUNTS:
        if name in fields and (type(fields[name]) is not int or fields[name] < 1):
            raise ValueError(f"{name} = {fields[name]!r} is not a whole number above 0")
    for name in _COUNTS_OR_ZERO:
        if name in fields and (type(fields[name]) is not int or fields[name] < 0):
            raise ValueError(f"{name} = {fields[name]!r} is not a count")
    hidden, layers, heads = fields["hidden_size"], fields["num_hidden_layers"], fields["num_attention_heads"]
    experts = next((fields[key] for key in _EXPERT_COUNTS if fields.get(key)), 0)
    chosen = fields.get("num_experts_per_tok", 0) if experts else 0
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok = {chosen} is more than the {experts} experts of a layer")
    kv_rank = fields.get("kv_lora_rank", 0)
    head_dim = fields.get("head_dim") or hidden // heads
    value_dim = head_dim
    if kv_rank:
        head_dim = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        value_dim = fields["v_head_dim"]
    expert_inner = fields.get("moe_intermediate_size") or fields["intermediate_size"]
    shared_inner = fields.get("shared_expert_intermediate_size") or fields.get("n_shared_experts", 0) * expert_inner
    found = ModelArchitecture(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=fields["vocab_size"],
        is_tied=bool(fields.get("tie_word_embeddings")),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_dim=value_dim,
        query_rank=fields.get("q_lora_rank", 0) if kv_rank else 0,
        kv_rank=kv_rank,
        rope_dim=fields["qk_rope_head_dim"] if kv_rank else 0,
        has_query_norm=family in ("qwen3", "qwen3_moe", "gemma3_text") or bool(fields.get("use_qk_norm")),
        num_layer_norms=4 if family in ("gemma2", "gemma3_text", "glm4") else 2,
        dense_inner=fields["intermediate_size"],
        dense_layers=tuple(_list_dense_layers(fields) if experts else range(layers)),
        num_experts=experts,
        experts_per_token=chosen,
        expert_inner=expert_inner if experts else 0,
        shared_inner=shared_inner if experts else 0,
        has_shared_gate=family == "qwen2_moe",
        has_precise_router=family in ("deepseek_v2", "deepseek_v3", "glm4_moe"),
    )
    return msgspec.structs.replace(found, num_biases=_count_biases(fields, found))


def _list_dense_layers(fields: Mapping[str, Any]) -> list[int]:
    """List the layers without experts of a model that has some: the first ones, those named, or all but every n-th."""
    num_layers, every = fields["num_hidden_layers"], fields.get("decoder_sparse_step") or 1
    dense = set(range(fields.get("first_k_dense_replace") or 0)) | set(fields.get("mlp_only_layers") or ())
    return [layer for layer in range(num_layers) if layer in dense or (layer + 1) % every]


def _count_biases(fields: Mapping[str, Any], shape: ModelArchitecture) -> int:
    """Count the biases of one layer, in its attention; a dense MLP with biases is counted too."""
    found, has_bias = 0, bool(fields.get("attention_bias"))
    if shape.kv_rank:
        return has_bias * (shape.query_rank + shape.kv_rank + shape.rope_dim + shape.hidden_size)
    inputs = shape.num_heads * shape.head_dim + shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    if has_bias or shape.family == "qwen2" or fields.get("qkv_bias"):
        found += inputs
    if has_bias and shape.family not in ("glm", "glm4", "glm4_moe"):
        found += shape.hidden_size
    return found + bool(fields.get("mlp_bias")) * (2 * shape.dense_inner + shape.hidden_size)


def guess_architecture(num_params: int) -> ModelArchitecture:
    """Guess the sizes of a dense model from its number of weights alone.

    From 8 billion weights on, Qwen and Llama models have these layers and this KV within a third; smaller models may
    have half or a fifth of this KV.
    """
    billions = num_params / 1e9
    num_heads, num_layers = max(1, round(13 * billions**0.42)), max(1, round(19 * billions**0.32))
    hidden = 128 * num_heads
    found = ModelArchitecture(
        family="",
        num_layers=num_layers,
        hidden_size=hidden,
        vocabulary_size=min(_GUESSED_VOCABULARY, max(1, num_params // (8 * hidden))),
        is_tied=False,
        num_heads=num_heads,
        num_kv_heads=min(8, num_heads),
        head_dim=128,
        value_dim=128,
        dense_layers=tuple(range(num_layers)),
    )
    inner = max(1, round((num_params - found.num_params) / (3 * hidden * num_layers)))
    return msgspec.structs.replace(found, dense_inner=inner)
