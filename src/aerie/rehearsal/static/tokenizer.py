"""Is the tokenizer there and this model's own, and does the chat have its template and its processor.

vLLM loads a tokenizer of another model without a word: every id is one of the embedding's, and the answers are noise.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aerie.checkpoint.config import ConfigError, Target
from aerie.checkpoint.tokenizer import CONFIG, TIKTOKEN, VOCABULARIES, Tokenizer
from aerie.rehearsal.findings import Finding, failed, passed, skipped, warned
from aerie.rehearsal.stand_in import stand_in_for
from aerie.rehearsal.static.settings import Settings

_CHECK = "tokenizer"
_PADDING = 1024
"""Rows that an embedding may have beyond its tokens: DeepSeek-V3 has 465, Llama 4 has 913."""
_END_OF_TURN = "<|im_end|>"
_PLACEHOLDER = "<|media_pad|>"
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_FETCH = "fetch config.json and the tokenizer's files from one and the same revision"
_JINJA = "{}\n"  # what makes vLLM take --chat-template for the template itself (vllm/renderers/chat_utils.py)


def tokenizer_is_right(target: Target, tokenizer: Tokenizer, settings: Settings, *, needed: bool) -> Iterator[Finding]:
    """Yield what is wrong with the target's tokenizer and its companions, or that nothing is.

    `needed` is false for a rehearsal without weights, to which a checkpoint may come without these files.
    """
    if tokenizer.vocabulary or needed:
        yield _tokenizer(target, tokenizer, settings)
        yield _end_of_turn(target, tokenizer)
    else:
        yield _stand_in(target)
    yield _template(tokenizer, settings, needed=needed)
    if target.is_multimodal and not settings.flag("language-model-only"):
        yield _preprocessor(target)


def _stand_in(target: Target) -> Finding:
    try:
        stand_in_for(target)
    except ConfigError as error:
        return failed(_CHECK, str(error), "fetch the checkpoint's tokenizer")
    return skipped(_CHECK, f"{target.directory} has none: a stand-in with config.json's ids takes its place")


def _tokenizer(target: Target, tokenizer: Tokenizer, settings: Settings) -> Finding:
    return (
        _files(tokenizer)
        or _code(tokenizer, settings)
        or _vocabulary(target, tokenizer)
        or _special_ids(target, tokenizer)
        or passed(_CHECK, _counted(target, tokenizer))
    )


def _counted(target: Target, tokenizer: Tokenizer) -> str:
    if tokenizer.ordinary is None:
        return f"{tokenizer.vocabulary}, whose tokens are not counted here"
    return f"{tokenizer.vocabulary}: {_size(tokenizer):,} ids of {target.vocabulary:,}"


def _files(tokenizer: Tokenizer) -> Finding | None:
    if tokenizer.faults:
        return failed(_CHECK, "; ".join(tokenizer.faults), f"fetch it again into {tokenizer.directory}")
    if tokenizer.vocabulary is None:
        return failed(
            _CHECK,
            f"{tokenizer.directory} has none of {', '.join(VOCABULARIES)}",
            "fetch the checkpoint's tokenizer, too, or name its directory with tokenizer",
        )
    return None


def _code(tokenizer: Tokenizer, settings: Settings) -> Finding | None:
    mapped = tokenizer.config.get("auto_map")
    mapped = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped  # the older form is the list itself
    classes = [name for name in (mapped if isinstance(mapped, list) else [mapped]) if isinstance(name, str)]
    if classes and not settings.flag("trust-remote-code"):
        return failed(
            _CHECK, f"{CONFIG} takes code of the checkpoint's own, {classes[0]}", "set trust-remote-code: true"
        )
    # What stands before two dashes is another repository.
    files = [f"{name.rpartition('.')[0]}.py" for name in classes if "--" not in name]
    if missing := [name for name in files if name not in tokenizer.names]:
        return failed(_CHECK, f"{CONFIG} takes {classes[0]}, and there is no {missing[0]}", f"fetch {missing[0]}, too")
    return None


def _vocabulary(target: Target, tokenizer: Tokenizer) -> Finding | None:
    ordinary, special = tokenizer.ordinary, tokenizer.special
    if ordinary is None:
        return None
    if tokenizer.vocabulary == TIKTOKEN and special and min(special.values()) != ordinary:
        return failed(
            _CHECK,
            f"{TIKTOKEN} has {ordinary:,} tokens, and the special ones of {CONFIG} begin at {min(special.values()):,}, "
            "which should be the next",
            _FETCH,
        )
    size = _size(tokenizer)
    if not target.vocabulary - _PADDING <= size <= target.vocabulary:
        return failed(
            _CHECK,
            f"{tokenizer.vocabulary} and {CONFIG} have {size:,} ids, and config.json's vocab_size is "
            f"{target.vocabulary:,}: it is another model's",
            _FETCH,
        )
    return None


def _size(tokenizer: Tokenizer) -> int:
    return max((tokenizer.ordinary or 0) - 1, *tokenizer.special.values(), 0) + 1


def _special_ids(target: Target, tokenizer: Tokenizer) -> Finding | None:
    """Compare the ids that both config.json and the tokenizer know; the end of a text has several names in Kimi's."""
    for field, token in (
        ("bos_token_id", tokenizer.role("bos_token")),
        ("pad_token_id", tokenizer.role("pad_token")),
        ("media_placeholder_token_id", _PLACEHOLDER),
    ):
        given, found = target.whole.get(field), tokenizer.special.get(token or "")
        if given is not None and found is not None and given != found:
            return failed(
                _CHECK, f"{token} is {found}, and config.json's {field} is {given}: it is another model's", _FETCH
            )
    ends = _ids(target.whole.get("eos_token_id")) - set(tokenizer.special.values())
    if tokenizer.special and ends:
        return failed(_CHECK, f"config.json's eos_token_id {min(ends)} is no special token of the tokenizer", _FETCH)
    return None


def _end_of_turn(target: Target, tokenizer: Tokenizer) -> Finding:
    """Look for the token that ends a turn among those at which vLLM ends an answer.

    These are the tokenizer's own end and generation_config.json's, in place of which stand config.json's where there is
    no such file (vllm/transformers_utils/config.py, try_get_generation_config).
    """
    check, turn = "end of turn", tokenizer.special.get(_END_OF_TURN)
    if turn is None:
        return skipped(check, f"the tokenizer's files list no {_END_OF_TURN}")
    own = tokenizer.special.get(tokenizer.role("eos_token") or "")
    ends = _ids(tokenizer.generation.get("eos_token_id")) or _ids(target.whole.get("eos_token_id"))
    if turn not in ends | {own}:
        return warned(
            check,
            f"{_END_OF_TURN} ({turn}) is none of the tokens that end an answer: {sorted(ends | _ids(own))}",
            "fetch generation_config.json, too, or let clients send stop_token_ids",
        )
    return passed(check, f"{_END_OF_TURN} ({turn}) ends an answer")


def _ids(given: object) -> set[int]:
    return {each for each in (given if isinstance(given, list) else [given]) if type(each) is int}


def _template(tokenizer: Tokenizer, settings: Settings, *, needed: bool) -> Finding:
    if (given := settings.text("chat-template")) is not None:
        return _given_template(given)
    check = "chat template"
    if found := [name for name in _TEMPLATES if name in tokenizer.names]:
        return passed(check, found[0])
    if tokenizer.config.get("chat_template"):
        return passed(check, f"in {CONFIG}")
    if not needed and tokenizer.vocabulary is None:
        return skipped(check, "it comes with the tokenizer")
    return failed(
        check,
        f"{tokenizer.directory} has no {_TEMPLATES[0]}, and {CONFIG} holds none: every chat would be refused",
        f"fetch {_TEMPLATES[0]}, too, or give one with chat-template",
    )


def _given_template(given: str) -> Finding:
    check = "chat template"
    if any(letter in given for letter in _JINJA):
        return passed(check, "given as it is")
    with suppress(OSError, ValueError):  # of a name that no file can have
        if Path(given).is_file():
            return passed(check, given)
    return failed(check, f"chat-template {given} is no file here", "mount it there, or give the path that it has")


def _preprocessor(target: Target) -> Finding:
    check = "preprocessor"
    if found := [name for name in _PREPROCESSORS if (target.directory / name).is_file()]:
        return passed(check, found[0])
    return failed(
        check,
        f"{target.directory} has no {_PREPROCESSORS[0]}, without which vLLM does not start for a model with vision",
        f"fetch {_PREPROCESSORS[0]}, too, or set language-model-only: true",
    )
