"""The config.json of a target and of a drafter, as far as they decide which code runs and which tensors there must be.

Both are read with the names that the published checkpoints use, and all that will be asked of them is read at once: a
field of another form is refused here and nowhere later. A field has to be there where its default is DeepSeek-V3's or
Llama's own size (transformers' DeepseekV3Config and LlamaConfig), which no checkpoint of another model means by leaving
it out. For the others stands what vLLM takes.
"""

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from aerie.checkpoint.files import regular_file

CONFIG = "config.json"

_DEEPSEEK = {"DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK2ForCausalLM"}
_WRAPPED = {"KimiK25ForConditionalGeneration"}
_MLA_DRAFTERS = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
_LLAMA_DRAFTERS = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}

# What is counted through has bounds well above the 61 layers, 384 experts and 163,840 tokens of Kimi-K2.5: a number
# with a digit too many ends in words, not in a list that fills the memory.
_MOST_LAYERS = 128
_MOST_EXPERTS = 512
_MOST_TOKENS = 2**20
_LARGEST = 2**31 - 1
_DEEPEST = 50
"""Objects and lists within one another. Published files have six; beyond some 300 Python cannot copy them."""
_LONGEST_SHOWN = 100
"""Characters of a value that a message repeats."""


class ConfigError(Exception):
    """A config.json that cannot be used; the message says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention; sizes in elements a head, ranks in elements."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """The routed and shared experts of the layers that are not dense."""

    routed: int
    active: int
    shared: int
    width: int
    first_layer: int
    """Layers before it are dense."""
    scale: float
    """What the sum of the routed ones is multiplied by."""


@dataclass(frozen=True)
class Vision:
    """MoonViT and its projector; widths in channels."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    patch: int
    positions: tuple[int, int]
    merge: tuple[int, int]


@dataclass(frozen=True)
class Quantization:
    """What of the target is quantised, and how."""

    method: str | None
    form: str | None
    bits: int
    group: int
    symmetric: bool
    ignore: tuple[str, ...]
    kv_cache: str | None
    """Of `kv_cache_scheme`, where there is one: the engine's `kv-cache-dtype: auto` follows it."""

    @property
    def is_packed_integers(self) -> bool:
        """Whether it is compressed-tensors' pack-quantized form, in which Kimi-K2.5 is published."""
        return (self.method, self.form) == ("compressed-tensors", "pack-quantized")

    def quantises(self, module: str) -> bool:
        """Return whether the weights of a linear layer are quantised; `ignore` has names and, after `re:`, patterns."""
        return not any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry in (module, module.rpartition(".")[2])
            for entry in self.ignore
        )


@dataclass(frozen=True)
class Target:
    """A target model: DeepSeek-V3's architecture, as Kimi-K2 and, behind a vision tower, Kimi-K2.5 and K2.6 have it.

    Raises ConfigError where the file does not say so, or not in the form in which it is read.
    """

    directory: Path
    whole: Mapping[str, Any]
    """The file."""

    def __post_init__(self) -> None:
        _read_all(self)

    @cached_property
    def architecture(self) -> str:
        """The class that vLLM takes for it."""
        return self._fields.architecture(_DEEPSEEK | _WRAPPED)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part."""
        return self._text.given

    @property
    def is_multimodal(self) -> bool:
        """Whether there is a vision tower before the language model."""
        return self.architecture in _WRAPPED

    @property
    def prefix(self) -> str:
        """What the names of the language model's tensors begin with."""
        return "language_model." if self.is_multimodal else ""

    @cached_property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self._text.number("hidden_size")

    @cached_property
    def layers(self) -> int:
        """Layers of the language model."""
        return self._text.number("num_hidden_layers", most=_MOST_LAYERS)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self._text.number("vocab_size", most=_MOST_TOKENS)

    @cached_property
    def positions(self) -> int:
        """Longest sequence; it has the yarn factor in it already."""
        return self._text.number("max_position_embeddings")

    @cached_property
    def dense_width(self) -> int:
        """Elements between the linear layers of a dense MLP."""
        return self._text.number("intermediate_size")

    @cached_property
    def dtype(self) -> str | None:
        """What it was published in, None where its file does not say."""
        return self._text.text("dtype") or self._text.text("torch_dtype")

    @cached_property
    def attention(self) -> Latent:
        """Its attention."""
        return self._text.latent()

    @cached_property
    def experts(self) -> Experts:
        """Its experts."""
        routed = self._text.number("n_routed_experts", most=_MOST_EXPERTS)
        return Experts(
            routed=routed,
            active=self._text.number("num_experts_per_tok", most=routed),
            shared=self._text.number("n_shared_experts", least=0),
            width=self._text.number("moe_intermediate_size"),
            first_layer=self._text.number("first_k_dense_replace", least=0),
            scale=self._text.factor("routed_scaling_factor", 2.5),
        )

    @cached_property
    def vision(self) -> Vision | None:
        """Its vision tower, None for a language model alone."""
        if not self.is_multimodal:
            return None
        given = self._fields.fields("vision_config")

        # The published file says vt_hidden_size and so on, transformers' own class hidden_size. What is left out has
        # the value of that class (Kimi_K25VisionConfig).
        def number(name: str, published: str, default: int, most: int = _LARGEST) -> int:
            return given.number(published if published in given.given else name, default, most=most)

        height, width = (number(f"pos_emb_{side}", f"init_pos_emb_{side}", 64) for side in ("height", "width"))
        return Vision(
            width=number("hidden_size", "vt_hidden_size", 1152),
            layers=number("num_hidden_layers", "vt_num_hidden_layers", 27, _MOST_LAYERS),
            heads=number("num_attention_heads", "vt_num_attention_heads", 16),
            mlp_width=number("intermediate_size", "vt_intermediate_size", 4304),
            patch=number("patch_size", "patch_size", 14),
            positions=(height, width),
            merge=given.pair("merge_kernel_size", (2, 2)),
        )

    @cached_property
    def quantization(self) -> Quantization | None:
        """How it is quantised; the published Kimi-K2.5 says so below text_config alone."""
        given = self._fields.fields("quantization_config") or self._text.fields("quantization_config")
        return given.quantization() if given else None

    @cached_property
    def _fields(self) -> "_Fields":
        return _Fields(self.directory, self.whole)

    @cached_property
    def _text(self) -> "_Fields":
        return self._fields.fields("text_config") or self._fields


@dataclass(frozen=True)
class Drafter:
    """An EAGLE-3 drafter, with MLA or with Llama's attention.

    Raises ConfigError where the file does not say so, or not in the form in which it is read.
    """

    directory: Path
    whole: Mapping[str, Any]
    """The file."""

    def __post_init__(self) -> None:
        _read_all(self, but=() if self.is_mla else ("attention",))

    @cached_property
    def architecture(self) -> str:
        """The class that vLLM takes for it."""
        return self._fields.architecture(_MLA_DRAFTERS | _LLAMA_DRAFTERS)

    @property
    def is_mla(self) -> bool:
        """Whether its attention is latent, as the target's."""
        return self.architecture in _MLA_DRAFTERS

    @cached_property
    def hidden_size(self) -> int:
        """Elements of its hidden state."""
        return self._fields.number("hidden_size")

    @cached_property
    def target_hidden_size(self) -> int:
        """Elements of each auxiliary state that its fc reads."""
        return self._fields.number("target_hidden_size", self.hidden_size)

    @cached_property
    def layers(self) -> int:
        """Decoder layers."""
        return self._fields.number("num_hidden_layers", most=_MOST_LAYERS)

    @cached_property
    def vocabulary(self) -> int:
        """Ids that it reads: the target's."""
        return self._fields.number("vocab_size", most=_MOST_TOKENS)

    @cached_property
    def draft_vocabulary(self) -> int:
        """Ids that it can draft."""
        return self._fields.number("draft_vocab_size", self.vocabulary, most=_MOST_TOKENS)

    @cached_property
    def width(self) -> int:
        """Elements between the linear layers of its MLP."""
        return self._fields.number("intermediate_size")

    @cached_property
    def positions(self) -> int | None:
        """Longest sequence that it was trained for, None where its file does not say."""
        name = "max_position_embeddings"
        return self._fields.number(name) if name in self.whole else None

    @cached_property
    def dtype(self) -> str | None:
        """What it was published in, None where its file does not say."""
        return self._fields.text("dtype") or self._fields.text("torch_dtype")

    @cached_property
    def attention(self) -> Latent:
        """Its attention where that is latent."""
        return self._fields.latent()

    @cached_property
    def heads(self) -> int:
        """Attention heads."""
        return self._fields.number("num_attention_heads")

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys and values, of Llama's attention."""
        return self._fields.number("num_key_value_heads", self.heads)

    @cached_property
    def head_size(self) -> int:
        """Elements of a head, of Llama's attention."""
        return self._fields.number("head_dim", self.hidden_size // self.heads)

    @cached_property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The ids of the auxiliary layers as they are written, in whichever spelling; None where there are none."""
        nested, name = self._fields.fields("eagle_config"), "eagle_aux_hidden_state_layer_ids"
        spellings = (self._fields.numbers(name), nested.numbers(name), nested.numbers("layer_ids"))
        return next((ids for ids in spellings if ids), None)

    @cached_property
    def aux_states(self) -> int:
        """How many auxiliary states its fc reads."""
        default = len(self.aux_layers or default_aux_layers(0))
        return self._fields.number("num_aux_hidden_states", default, most=_MOST_LAYERS + 1)

    @cached_property
    def _fields(self) -> "_Fields":
        return _Fields(self.directory, self.whole)


def read_target(directory: Path) -> Target:
    """Read a target's config.json; raises ConfigError where it is none, or of an architecture that is not served."""
    return Target(directory, _read(directory))


def read_drafter(directory: Path) -> Drafter:
    """Read a drafter's config.json; raises ConfigError where it is none, or of an architecture that is not served."""
    return Drafter(directory, _read(directory))


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs vLLM takes where the drafter names none (models/interfaces.py)."""
    return (2, layers // 2, layers - 3)


def _read(directory: Path) -> Mapping[str, Any]:
    path = directory / CONFIG
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give the directory of a checkpoint") from None
    except NotADirectoryError:
        raise ConfigError(f"{directory} is not a directory: give that of a checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not an object: fetch it again")
    level: list[Any] = [content]
    for _ in range(_DEEPEST):
        within = ((each.values() if isinstance(each, dict) else each) for each in level)
        level = [each for values in within for each in values if isinstance(each, dict | list)]
    if level:
        raise ConfigError(f"{path} is more than {_DEEPEST} objects and lists deep: fetch it again")
    return content


def _read_all(config: Target | Drafter, but: Container[str] = ()) -> None:
    """Ask for each property once, so that what is wrong is told here."""
    for name, each in vars(type(config)).items():
        if isinstance(each, property | cached_property) and name not in but:
            getattr(config, name)


class _Fields:
    """An object of a config.json; a field that is not of the type that is asked for raises ConfigError."""

    def __init__(self, directory: Path, given: Mapping[str, Any], prefix: str = "") -> None:
        self.directory, self.given, self.prefix = directory, given, prefix

    def __bool__(self) -> bool:
        return bool(self.given)

    def number(self, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """Return a whole number; null counts as missing where there is a default."""
        given = self.given.get(name)
        given = default if given is None else given
        if not _is_whole(given, least, most):
            raise self._wrong(name, f"a whole number of {least} to {most}")
        return given

    def factor(self, name: str, default: float) -> float:
        """Return a number above 0, whole or not."""
        match self.given.get(name, default):
            case int() | float() as given if type(given) is not bool and 0 < given < _LARGEST:
                return given
        raise self._wrong(name, "a number above 0")

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of layers' numbers, () where there is none."""
        match self.given.get(name):
            case None:
                return ()
            case [*numbers] if len(numbers) <= _MOST_LAYERS + 1 and all(_is_whole(each, 0) for each in numbers):
                return tuple(numbers)
        raise self._wrong(name, f"a list of whole numbers from 0 on, {_MOST_LAYERS + 1} at most")

    def pair(self, name: str, default: tuple[int, int]) -> tuple[int, int]:
        """Return a list of two whole numbers."""
        match self.given.get(name, default):
            case [first, second] if _is_whole(first, 1) and _is_whole(second, 1):
                return first, second
        raise self._wrong(name, "two whole numbers from 1 on")

    def text(self, name: str) -> str | None:
        """Return a text, None where there is none."""
        match self.given.get(name):
            case None | str() as given if given is None or given.isprintable():  # it is, in messages
                return given
        raise self._wrong(name, "text")

    def fields(self, name: str) -> "_Fields":
        """Return an object, one without fields where there is none."""
        match self.given.get(name):
            case None:
                return _Fields(self.directory, {})
            case dict() as given:
                return _Fields(self.directory, given, f"{self.prefix}{name}.")
        raise self._wrong(name, "an object")

    def patterns(self, name: str) -> tuple[str, ...]:
        """Return a list of names and, after `re:`, of regular expressions."""
        match self.given.get(name):
            case None:
                return ()
            case [*patterns] if all(isinstance(each, str) and _compiles(each) for each in patterns):
                return tuple(patterns)
        raise self._wrong(name, "a list of names and, after re:, of patterns")

    def architecture(self, known: set[str]) -> str:
        """Return the class that vLLM takes."""
        match self.given.get("architectures"):
            case [str(name)] if name in known:
                return name
        raise self._wrong("architectures", f"a list of one of {', '.join(sorted(known))}")

    def latent(self) -> Latent:
        """Return what they say of latent attention."""
        no_rank = self.given.get("q_lora_rank", "missing") is None
        return Latent(
            heads=self.number("num_attention_heads"),
            q_lora_rank=None if no_rank else self.number("q_lora_rank"),
            kv_lora_rank=self.number("kv_lora_rank"),
            nope=self.number("qk_nope_head_dim"),
            rope=self.number("qk_rope_head_dim"),
            value=self.number("v_head_dim"),
        )

    def quantization(self) -> Quantization:
        """Return what they say as a quantization_config; of several groups the first counts."""
        groups, scheme = self.fields("config_groups"), self.fields("kv_cache_scheme")
        weights = [groups.fields(name).fields("weights") for name in groups.given] or [groups]
        return Quantization(
            method=self.text("quant_method"),
            form=self.text("format"),
            bits=weights[0].number("num_bits", 0, least=0),
            group=weights[0].number("group_size", 0, least=-1),
            symmetric=weights[0].given.get("symmetric", True) is True,
            ignore=self.patterns("ignore"),
            kv_cache=f"{scheme.text('type')}{scheme.number('num_bits', 0, least=0)}" if scheme else None,
        )

    def _wrong(self, name: str, expected: str) -> ConfigError:
        given = self.given.get(name, ...)
        found = "missing" if given is ... else "null" if given is None else _shortened(repr(given))
        where = self.prefix + name
        where = _shortened(where if where.isprintable() else repr(where))
        return ConfigError(f"{self.directory / CONFIG}: {where} is {found}, expected {expected}")


def _is_whole(given: object, least: int, most: int = _LARGEST) -> TypeGuard[int]:
    return type(given) is int and least <= given <= most


def _compiles(entry: str) -> bool:
    try:
        re.compile(entry.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError):
        return not entry.startswith("re:")
    return True


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
