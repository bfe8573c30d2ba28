"""The known failures: their file is checked, and every entry recognises the log that it came from."""

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, Severity, parse_kernel
from aerie.diagnosis.signatures import SIGNATURES, SignatureError, Where, signatures
from aerie.startup.lines import parse

ENTRY = """\
- id: port-taken
  title: The port is taken
  match: "Address already in use"
  where: cause
  kind: configuration
  severity: fatal
  cause: Somebody else listens there.
  remedy: Choose another.
  source: vllm/entrypoints/launcher.py (0.32.0)
  excerpt: |
    OSError: [Errno 98] Address already in use
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "signatures.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_an_entry_is_read_with_its_pattern_and_choices(written):
    (entry,) = signatures(written(ENTRY))
    assert (entry.id, entry.kind, entry.severity, entry.where) == (
        "port-taken",
        Kind.CONFIGURATION,
        Severity.FATAL,
        Where.CAUSE,
    )
    assert entry.match.search(entry.excerpt)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("kind: configuration", "kind: weather"),
            "1 (port-taken): kind is 'weather', expected one of configuration",
        ),
        (("severity: fatal", "severity: bad"), "severity is 'bad', expected one of fatal, degraded, harmless"),
        (("where: cause", "where: log"), "where is 'log', expected one of cause, line, evidence"),
        (("where: cause", "where: line"), "needle, a literal that each such line contains, belongs to `where: line`"),
        (("where: cause", "where: cause\n  needle: x"), "needle, a literal"),
        (("where: cause", "where: evidence\n  frame: x"), "frame, a regular expression, belongs to `where: cause`"),
        (("where: cause", "where: cause\n  frame: '('"), "frame is no regular expression"),
        (
            ('"Address already in use"', '"(Address"'),
            "match is no regular expression: missing ), unterminated",
        ),
        (("source: vllm/entrypoints/launcher.py (0.32.0)", "source: ''"), "source must be a text that is not empty"),
        (("  title: The port is taken\n", ""), "title must be a text that is not empty, and is None"),
        (("severity: fatal", "severity: fatal\n  known: perhaps"), "known is 'perhaps', expected true or false"),
        (("id: port-taken", "id: Port taken"), "id must be words of small letters"),
        (("  title:", "  titel: x\n  title:"), "titel is no field of a signature"),
    ],
)
def test_a_wrong_entry_is_named_with_what_was_expected(written, change, problem):
    with pytest.raises(SignatureError) as refused:
        signatures(written(ENTRY.replace(*change)))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ENTRY + ENTRY, "id port-taken stands 2 times"),
        ("- just words\n", "is str, expected a mapping of id, title"),
        ("id: port-taken\n", "must be a list of signatures, and is dict"),
        ("[]\n", "must be a list of signatures"),
        ("- [unclosed\n", "signatures.yaml is not YAML"),
    ],
)
def test_a_wrong_file_is_refused(written, text, problem):
    with pytest.raises(SignatureError, match=r"signatures\.yaml") as refused:
        signatures(written(text))
    assert problem in str(refused.value)


def test_there_are_at_least_sixty():
    assert len(signatures(SIGNATURES)) >= 60


def outside(known):
    """The kernel's lines; what the supervisor saw by itself stands in plain words."""
    lines = known.excerpt.splitlines()
    return parse_kernel(known.excerpt) or [Evidence("supervisor", None, line, kind=known.kind) for line in lines]


@pytest.mark.parametrize("known", signatures(SIGNATURES), ids=lambda known: known.id)
def test_every_excerpt_is_recognised_as_what_it_is(known):
    collector = Collector(carried=True)
    if known.where is Where.EVIDENCE:
        diagnosis = collector.diagnose("was killed by SIGKILL", outside(known))
    else:
        collector.feed(parse(known.excerpt))
        ended = (
            None if known.kind is Kind.KILLED else "ended with exit code 1"
        )  # a killed one is known by its log alone
        diagnosis = collector.diagnose(ended, kind=Kind.HUNG if known.kind is Kind.HUNG else None)
    if known.severity is Severity.FATAL:
        assert diagnosis is not None
        assert diagnosis.signature == known.id
    else:
        assert known in collector.noticed
        assert Collector().diagnose() is None


def test_a_frame_tells_the_same_words_apart(written):
    (known,) = signatures(written(ENTRY.replace("where: cause", "where: cause\n  frame: worker.py in capture_model")))
    frame = '  File "/v/site-packages/vllm/worker.py", line 1, in {}\n'
    log = "Traceback (most recent call last):\n" + frame + "OSError: Address already in use\n"
    for function, signature in (("capture_model", "port-taken"), ("load_model", None)):
        collector = Collector([known])
        collector.feed(parse(log.format(function)))
        assert collector.diagnose().signature == signature


def test_a_fatal_line_alone_is_a_failure_unless_it_was_outlived(written):
    (known,) = signatures(written(ENTRY.replace("where: cause", "where: line\n  needle: Address")))
    collector = Collector([known])
    collector.feed(parse("Address already in use\n"))
    assert collector.diagnose().signature == "port-taken"
    collector.feed(parse("INFO:     Application startup complete.\n"))
    assert collector.diagnose() is None


@pytest.mark.parametrize("known", signatures(SIGNATURES), ids=lambda known: known.id)
def test_every_line_signature_is_found_by_its_needle(known):
    if known.where is Where.LINE:
        assert any(known.needle in line.text and known.match.search(line.text) for line in parse(known.excerpt))


def raised(text, *frames):
    """A worker's traceback through these frames, the outermost first."""
    places = [frame.split(" in ") for frame in ("vllm/v1/executor/multiproc_executor.py in worker_main", *frames)]
    trace = [f'  File "/opt/venv/lib/python3.11/site-packages/{file}", line 1, in {name}' for file, name in places]
    lines = ["Traceback (most recent call last):", *trace, *text.splitlines()]
    return "".join(f"(Worker pid=611) ERROR 11-29 20:14:09 [multiproc_executor.py:953] {line}\n" for line in lines)


def printed(text):
    """What a process prints that dies of an exception, as the API server does."""
    place = '  File "/opt/venv/bin/vllm", line 8, in <module>\n    sys.exit(main())\n'
    return f"Traceback (most recent call last):\n{place}{text}\n"


# Words that a signature is about, said by somebody else: what they mean there is another thing.
INNOCENT = [
    ("argument-unknown", "numactl.py: error: unrecognized arguments: --membind\n"),
    ("argument-value-refused", "bench.py: error: argument --seed: invalid int value: 'x'\n"),
    (
        "config-file-no-yaml",
        raised("yaml.scanner.ScannerError: found a tab", "transformers_modules/kimi/processing.py in load_tables"),
    ),
    ("heads-not-divisible", raised("AssertionError: 7168 is not divisible by 96", "vllm/lora/layers/utils.py in pad")),
    ("kv-cache-dtype-unsupported", raised("CompilationError: type fp8e4nv not supported in this architecture.")),
    (
        "quantization-mismatch",
        raised("ValueError: Cannot find the config file for plugin", "vllm/plugins/io.py in get"),
    ),
    ("environment-value-refused", raised("ValueError: invalid literal for int() with base 10: 'x'")),
    (
        "environment-value-refused",
        raised("ValueError: invalid literal for int() with base 10: '2.5'", "vllm/tool_parsers/kimi_k2.py in extract"),
    ),
    (
        "cpu-cache-size-not-whole",
        raised("ValueError: invalid literal for int() with base 10: '2.5'", "vllm/tool_parsers/kimi_k2.py in extract"),
    ),
    ("log-level-unknown", raised("ValueError: Unknown level: 'LOUD'", "logging/__init__.py in setLevel")),
    ("model-config-broken", raised("OSError: '/data/models/x/adapter_config.json' is not a valid JSON file.")),
    ("model-config-contradicts-itself", raised("TypeError: Validation error for field 'temperature'")),
    ("tokenizer-missing", raised("PermissionError: [Errno 13] Permission denied: '/data/models/x/tiktoken.model'")),
    ("image-processor-missing", raised("PermissionError: cannot read the preprocessor_config.json file")),
    ("weights-cut-short", raised("zstandard.HeaderTooSmall: 3 bytes")),
    ("weights-header-broken", raised("requests.exceptions.InvalidHeader: Header part must be str")),
    (
        "permission-denied",
        raised("PermissionError: [Errno 13] Permission denied", "vllm/entrypoints/launchers/launcher.py in bind"),
    ),
    ("permission-denied", raised("PermissionError: [Errno 13] Permission denied: '/dev/nvidiactl'")),
    (
        "cache-not-executable",
        raised("ImportError: libtorch.so: failed to map segment from shared object: Cannot allocate memory"),
    ),
    (
        "drafter-weights-do-not-fit",
        raised("ValueError: not a KeyError, but a shape", "vllm/model_executor/models/llama_eagle3.py in load_weights"),
    ),
    (
        "tensor-unknown",
        raised("KeyError: 'model.layers.3.self_attn.attn'", "vllm/v1/worker/utils.py in bind_kv_cache"),
    ),
    (
        "image-token-index-missing",
        raised(
            "AttributeError: 'LlavaProcessor' object has no attribute 'image_token_id'",
            "vllm/multimodal/processing.py in apply",
        ),
    ),
    (
        "eagle3-over-stages-unsupported",
        raised("AttributeError: 'Namespace' object has no attribute 'drafter'", "vllm/entrypoints/cli/serve.py in cmd"),
    ),
    (
        "drafter-is-no-drafter",
        raised("AttributeError: 'KimiK25Config' object has no attribute 'vocab_size'", "vllm/v1/sample/ops.py in bias"),
    ),
    (
        "tls-certificate-missing",
        raised("FileNotFoundError: [Errno 2] No such file or directory", "httpx/_config.py in create_ssl_context"),
    ),
    (
        "tls-certificate-missing",
        (
            '  File "/opt/venv/lib/python3.11/site-packages/httpx/_config.py", line 40, in create_ssl_context\n'
            "    ctx.load_cert_chain(certfile=cert[0])\n"
            "FileNotFoundError: [Errno 2] No such file or directory\n"
        ),
    ),
    (
        "gpu-number-unknown",
        raised(
            "vllm.third_party.pynvml.NVMLError_InvalidArgument: Invalid Argument",
            "vllm/third_party/pynvml.py in nvmlDeviceGetFieldValues",
        ),
    ),
    (
        "custom-allreduce-failed",
        "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'unspecified launch failure'",
    ),
    (
        "c-compilation-failed",
        raised(
            "subprocess.CalledProcessError: Command 'gcc -v' returned non-zero exit status 1.", "a/site.py in probe"
        ),
    ),
    ("compile-cache-poisoned", raised("AssertionError: Expected tensors only, but got: <class 'int'>")),
    ("extension-of-another-torch", raised("ImportError: /opt/x/_rs.so: undefined symbol: _ZN4rust9alloc_errEv")),
    ("cublas-failed", raised("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")),
    (
        "cublas-execution-failed",
        raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    (
        "hub-gated",
        raised("aiohttp.ClientResponseError: 403 Client Error: Forbidden for url: https://example.org/a.png"),
    ),
    ("hub-gated", raised("requests.exceptions.HTTPError: 401 Client Error", "vllm/multimodal/media.py in fetch")),
    (
        "hub-unreachable",
        raised(
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='otel.example.org', port=443): "
            "Max retries exceeded with url: /v1/traces",
            "opentelemetry/exporter/otlp.py in export",
        ),
    ),
    ("threads-not-started", raised("BlockingIOError: [Errno 11] Resource temporarily unavailable", "zmq/s.py in recv")),
    (
        "process-not-started",
        raised("BlockingIOError: [Errno 11] Resource temporarily unavailable", "vllm/utils/lock.py in flock"),
    ),
    ("threads-not-started-in-libraries", "zmq: Resource temporarily unavailable (src/tcp.cpp:240)"),
    (
        "config-value-refused",
        printed("pydantic_core._pydantic_core.ValidationError: 1 validation error for SamplingConfig\ntop_k\n  Bad"),
    ),
    (
        "module-failed-to-import",
        "(Worker pid=9) WARNING 11-29 14:05:11 [import_utils.py:417] Module numba was found but failed to import",
    ),
    (
        "model-config-contradicts-itself",
        raised(
            "huggingface_hub.errors.StrictDataclassFieldValidationError: Validation error for field 'do_resize':",
            "transformers/processing_utils.py in __call__",
            "huggingface_hub/dataclasses.py in validate_typed_dict",
        ),
    ),
    ("eagle3-over-stages-unsupported", raised("ValueError: Mixer does not support LoRA with pipeline parallelism")),
    (
        "gpu-number-unknown",
        raised(
            "vllm.third_party.pynvml.NVMLError_InvalidArgument: Invalid Argument",
            "vllm/v1/worker/gpu_worker.py in init_device",
            "vllm/third_party/pynvml.py in nvmlDeviceGetMemoryAffinity",
        ),
    ),
    (
        "address-not-local",
        raised(
            "OSError: [Errno 99] Cannot assign requested address", "urllib3/util/connection.py in create_connection"
        ),
    ),
]


@pytest.mark.parametrize(("signature", "said"), INNOCENT, ids=[known for known, _ in INNOCENT])
def test_the_same_words_of_another_subsystem_are_not_taken_for_it(signature, said):
    assert signature in {known.id for known in signatures(SIGNATURES)}
    collector = Collector()
    collector.feed(parse(said))
    diagnosis = collector.diagnose("ended with exit code 1")
    assert diagnosis.signature != signature
    assert signature not in {known.id for known in collector.noticed}


CURED_BY_ANOTHER_START = {
    "cublas-execution-failed",
    "disk-full",
    "engine-start-timeout",
    "hub-unreachable",
    "process-not-started",
    "threads-not-started",
    "threads-not-started-in-libraries",
    "too-many-open-files",
}


def test_what_another_start_may_cure_is_tried_again():
    kinds = {known.id: known.kind for known in signatures(SIGNATURES)}
    assert {kinds[signature] for signature in CURED_BY_ANOTHER_START} == {Kind.CRASH}
