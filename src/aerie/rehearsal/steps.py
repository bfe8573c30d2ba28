"""What is asked of the rehearsal's engine once it is ready: the kinds of requests that the service is for.

The pair's text is known in advance, so each answer is compared token by token: the target alone decides what is said,
and a speculation that changes the output is seen, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

from aerie.checkpoint.shrink import Profile
from aerie.rehearsal.findings import Finding, failed, passed, skipped
from aerie.rehearsal.service import RefusedError, Service

_SAID = 48  # tokens of a raw answer
_SHORT = 12  # tokens of each of many
_WORDS = 1000  # ids that prompts are made of, from 0 on
_CACHED = 300  # tokens of a prompt that is sent twice
_EMPTIES_WITHIN = 10.0  # seconds after the last answer
_ACCEPTED = 0.9  # of the first drafts, all of which are right; the last draft of an answer may be cut off
_MOST_AT_ONCE = {Profile.GPU: 128, Profile.CPU: 8}
_LOG = "read the engine's log, which --work-dir keeps"
# 56 x 56 pixels: four of MoonViT's patches each way.
_PICTURE = "iVBORw0KGgoAAAANSUhEUgAAADgAAAA4AQAAAACA/QazAAAAEElEQVR42mP4AAEMo/SQpAGkj2+QpuHuxwAAAABJRU5ErkJggg=="

Step = Callable[[Service], Iterator[Finding]]


def run(check: str, service: Service) -> list[Finding]:
    """Return what one of STEPS came to."""
    try:
        return list(STEPS[check](service))
    except RefusedError as error:
        return [failed(check, str(error), _LOG)]
    except (LookupError, TypeError, ValueError) as error:
        return [failed(check, f"the answer has not the form of OpenAI's API ({error!r})", _LOG)]


def _text(service: Service) -> Iterator[Finding]:
    check, pair = "text", service.pair
    answer = service.chat("Are you ready?", len(pair.chain.tokens))
    choice = answer["choices"][0]
    if wrong := _differs(service, answer["prompt_token_ids"], choice["token_ids"]):
        yield failed(check, wrong, _LOG)
        return
    message = choice["message"]
    said, thought = message.get("content") or "", message.get("reasoning") or message.get("reasoning_content") or ""
    parser = service.settings.text("reasoning-parser")
    if parser and not (thought.strip() == pair.thought.strip() and said.strip().startswith(pair.answer.strip())):
        yield failed(
            check,
            f"reasoning-parser {parser} made the thought {thought!r} and the answer {said!r} of a text that thinks "
            f"{pair.thought!r} and answers {pair.answer!r}",
            "set the parser of the model's own family: reasoning-parser: kimi_k2",
        )
        return
    apart = ", thought and answer apart" if parser else ""
    yield passed(check, f"{len(choice['token_ids'])} tokens, each as it was to be{apart}")


def _picture(service: Service) -> Iterator[Finding]:
    check = "picture"
    if not service.reads_pictures:
        yield skipped(check, "the target is to read no pictures")
        return
    question = {"type": "text", "text": "What is this?"}
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PICTURE}"}}
    without = service.chat([question], 1)["usage"]["prompt_tokens"]
    answer = service.chat([picture, question], _SHORT)
    tokens = answer["usage"]["prompt_tokens"] - without
    if wrong := _differs(service, answer["prompt_token_ids"], answer["choices"][0]["token_ids"]):
        yield failed(check, wrong, _LOG)
    elif tokens <= 0:
        yield failed(
            check, "a picture added no token to the prompt", "check chat template and preprocessor_config.json"
        )
    else:
        yield passed(check, f"it took {tokens} tokens of the prompt, and the answer is as it was to be")


def _tool_call(service: Service) -> Iterator[Finding]:
    check = "tool call"
    parser, function = service.settings.text("tool-call-parser"), service.pair.chain.function
    if not (service.settings.flag("enable-auto-tool-choice") and parser):
        yield skipped(check, "enable-auto-tool-choice and tool-call-parser are not set")
        return
    if function is None:
        yield skipped(check, "the tokenizer has no tokens for a call that are all different")
        return
    tool = {"type": "function", "function": {"name": function, "parameters": {"type": "object", "properties": {}}}}
    name, arguments, events, ended = "", "", 0, None
    length = len(service.pair.chain.tokens) + 1
    for event in service.stream_chat("Call it.", length, tools=[tool], tool_choice="auto"):
        events += 1
        for choice in event["choices"]:
            ended = choice.get("finish_reason") or ended
            for call in choice["delta"].get("tool_calls") or ():
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    if (name, arguments.strip(), ended) == (function, "{}", "tool_calls"):
        yield passed(check, f"{function}({{}}) in {events} events of a stream")
    else:
        yield failed(
            check,
            f"tool-call-parser {parser} made {name!r} with {arguments!r}, which ended with {ended}, of a call of "
            f"{function!r} with {{}}",
            "set the parser of the model's own family: tool-call-parser: kimi_k2",
        )


def _long_prompt(service: Service) -> Iterator[Finding]:
    check, step = "long prompt", service.settings.step_tokens
    longest = service.longest - _SHORT - 1
    length = min(longest, 2 * step + 17) if service.profile is Profile.GPU else longest
    prompt = _prompt(service, length)
    if wrong := _differs(service, prompt, service.say(prompt, _SHORT)["token_ids"]):
        yield failed(check, wrong, _LOG)
        return
    steps = -(-length // step)
    yield passed(check, f"{length:,} tokens in {steps} step{'s' * (steps > 1)}, and the answer is as it was to be")


def _parallel(service: Service) -> Iterator[Finding]:
    check = "parallel requests"
    count = min(service.settings.sequences, _MOST_AT_ONCE[service.profile])
    # Each begins elsewhere in the script, so that answers that get mixed up are seen.
    prompts = [[1, number * 7 % _words(service)] for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda prompt: service.say(prompt, _SHORT)["token_ids"], prompts))
    found = [_differs(service, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    if wrong := [each for each in found if each]:
        yield failed(check, f"{len(wrong)} of {count} answers are wrong; the first: {wrong[0]}", _LOG)
    else:
        yield passed(check, f"{count} at once, each answer as it was to be")


def _speculation(service: Service) -> Iterator[Finding]:
    check = "speculation"
    if not service.settings.speculation or service.pair.drafter is None:
        yield skipped(check, "there is no speculative-config")
        return
    before = service.metrics().speculation
    prompt = [service.pair.chain.tokens[0]]
    said = service.say(prompt, _SAID)["token_ids"]
    after = service.metrics().speculation
    if wrong := _differs(service, prompt, said):
        yield failed(check, f"the output is not the target's own: {wrong}", _LOG)
        return
    counted = after - before if before and after else None
    if not counted or not counted.drafts:
        yield failed(check, f"nothing was drafted for {_SAID} tokens", f"is the drafter loaded? {_LOG}")
        return
    if service.pair.expected_acceptance is None:
        yield passed(check, f"{counted}; how many are right is not known of a drafter without a head of its own")
        return
    first, *further = counted.accepted_by_position or (0,)
    if first < _ACCEPTED * counted.drafts or any(further):
        accepted = ", ".join(map(str, counted.accepted_by_position))
        yield failed(
            check,
            f"of {counted.drafts} drafts the target accepted {accepted} tokens by position; all of the first are "
            "right, and none of the others",
            "the drafter reads other hidden states, or maps its ids wrongly: see aux layers and vocabulary",
        )
        return
    yield passed(check, f"{counted}: all of the first, none of the others, as it was to be")


def _without_speculation(service: Service) -> Iterator[Finding]:
    """Let the target score the known text in one piece, without a drafter, and ask whether it agrees."""
    check = "same without speculation"
    start = service.pair.chain.tokens[0]
    text = [start, *service.pair.script.continuation(start, _SAID)]
    ranked = service.say(text, 1, prompt_logprobs=0)["prompt_logprobs"][1:]
    others = [token for token, place in zip(text[1:], ranked, strict=True) if place[str(token)]["rank"] != 1]
    if others:
        yield failed(check, f"at {len(others)} of {_SAID} places the target alone would have said another token", _LOG)
    else:
        yield passed(check, f"the target alone says the same {_SAID} tokens")


def _cache(service: Service) -> Iterator[Finding]:
    check = "KV cache"
    prompt = _prompt(service, min(_CACHED, service.longest - _SHORT - 1))
    for which in ("first", "second"):
        if wrong := _differs(service, prompt, service.say(prompt, _SHORT)["token_ids"]):
            yield failed(check, f"the {which} time: {wrong}", _LOG)
            return
    began = time.monotonic()
    while (now := service.metrics()).kv_cache_usage or now.requests_running or now.requests_waiting:
        if time.monotonic() - began > _EMPTIES_WITHIN:
            yield failed(
                check, f"{now.kv_cache_usage:.1%} are held {_EMPTIES_WITHIN:.0f} s after the last answer", _LOG
            )
            return
        time.sleep(0.2)
    yield passed(check, "the same prompt twice gave the same answer, and nothing is held afterwards")


STEPS: dict[str, Step] = {
    "text": _text,
    "picture": _picture,
    "tool call": _tool_call,
    "long prompt": _long_prompt,
    "parallel requests": _parallel,
    "speculation": _speculation,
    "same without speculation": _without_speculation,
    "KV cache": _cache,
}
"""By the name of the check, in the order in which they are run."""


def _prompt(service: Service, length: int) -> list[int]:
    """Return ids in which the answer's own tokens stand, too: those read what was cached of them long ago."""
    tokens = service.pair.chain.tokens
    return [*islice(cycle([*tokens, *range(_words(service))]), length - 1), tokens[0]]


def _words(service: Service) -> int:
    return min(_WORDS, service.pair.script.vocabulary)


def _differs(service: Service, prompt: Sequence[int], said: Sequence[int]) -> str | None:
    """Return where an answer is not the script's, None where it is."""
    script = service.pair.script.continuation(prompt[-1], len(said))
    for number, (token, expected) in enumerate(zip(said, script, strict=True), 1):
        if token != expected:
            return f"token {number} of {len(said)} is {token}, and {expected} was to be"
    return None if said else "the answer is empty"
