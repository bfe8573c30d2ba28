"""The root cause is what broke first, in the process that broke, and no echo of it."""

# ruff: noqa: E501 - a log's lines are as long as they are

from textwrap import dedent

import pytest

from aerie.diagnosis import Collector, Kind
from aerie.startup.lines import parse

ECHOES = """\
    (EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1510] EngineCore failed to start.
    (EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1510] Traceback (most recent call last):
    (EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1510]   File "/v/site-packages/vllm/v1/engine/core.py", line 1482, in run_engine_core
    (EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1510]     engine_core = EngineCoreProc(*args, **kwargs)
    (EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1510] RuntimeError: Worker failed with error 'no weights', please check the stack trace above for the root cause
    (EngineCore pid=7) ERROR 11-29 13:35:03 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.
    Process EngineCore:
    Traceback (most recent call last):
      File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
        self.run()
      File "/v/site-packages/vllm/v1/engine/core.py", line 1514, in run_engine_core
        raise e
    RuntimeError: Worker failed with error 'no weights', please check the stack trace above for the root cause
    Traceback (most recent call last):
      File "/v/bin/vllm", line 8, in <module>
        sys.exit(main())
      File "/v/site-packages/vllm/entrypoints/cli/main.py", line 120, in main
        args.dispatch_function(args)
      File "/v/site-packages/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
        raise RuntimeError(
    RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
    """
WORKER = """\
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063] WorkerProc hit an exception.
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063] Traceback (most recent call last):
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063]   File "/v/site-packages/vllm/v1/worker/gpu_worker.py", line 42, in load_model
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063]     read()
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063]   File "/v/site-packages/safetensors/torch.py", line 5, in read
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063]     raise ValueError
    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063] ValueError: no weights
    """
UNCAUGHT = """\
    Traceback (most recent call last):
      File "/v/bin/vllm", line 8, in <module>
        sys.exit(main())
      File "/v/site-packages/vllm/entrypoints/cli/main.py", line 120, in main
        args.dispatch_function(args)
"""


def collected(*texts):
    collector = Collector(known=())
    for text in texts:
        collector.feed(parse(dedent(text)))
    return collector


def diagnosed(*texts, **known):
    return collected(*texts).diagnose(**known)


def root(*texts, **known):
    return diagnosed(*texts, **known).root


def test_the_worker_that_broke_wins_over_all_that_say_so():
    found = root(WORKER, ECHOES)
    assert (found.text, found.process, found.pid) == ("ValueError: no weights", "Worker_TP3", 9)


def test_the_innermost_frame_of_vllm_is_shown_and_the_true_innermost_kept():
    found = root(WORKER, ECHOES)
    assert (found.file, found.line, found.function) == ("vllm/v1/worker/gpu_worker.py", 42, "load_model")
    assert found.innermost == "safetensors/torch.py:5 in read"


def test_code_that_came_with_the_model_tells_as_much_as_vllms():
    text = WORKER.replace("safetensors/torch.py", "transformers_modules/kimi/modeling.py").replace(
        "/v/site-packages/", "/"
    )
    assert root(text).file.endswith("transformers_modules/kimi/modeling.py")


def test_the_lines_themselves_are_kept():
    assert root(WORKER, ECHOES).excerpt[0] == "WorkerProc hit an exception."
    assert root(WORKER, ECHOES).excerpt[-1] == "ValueError: no weights"


def test_an_echo_that_quotes_is_told_where_the_rest_was_lost():
    found = root(ECHOES)
    assert found.text.startswith("RuntimeError: Worker failed with error 'no weights'")
    assert found.process == "EngineCore"


def test_a_plain_echo_is_told_where_nothing_else_was_said():
    last = ECHOES[ECHOES.rindex("    Traceback") :]
    assert root(last).text.startswith("RuntimeError: Engine core initialization failed")


def test_of_echoes_alone_one_with_a_place_is_told():
    log = ECHOES.replace(
        "Worker failed with error 'no weights', please check the stack", "WorkerProc failed. See stack"
    )
    assert "died unexpectedly" in root(log).text
    found = root("\n".join(line for line in dedent(log).splitlines() if "died unexpectedly" not in line))
    assert found.place == "vllm/v1/engine/core.py:1482 in run_engine_core"


def test_a_process_without_a_prefix_is_known_by_its_frames():
    main = UNCAUGHT + '      File "/v/site-packages/vllm/entrypoints/api_server.py", line 9, in run_server\n'
    found = root("(APIServer pid=12) INFO 11-29 13:35:00 [a.py:1] up\n", main + "    OSError: no such model\n")
    assert (found.process, found.pid) == ("APIServer", 12)


def test_the_first_cause_of_a_chain_is_the_root_and_the_chain_is_kept():
    text = """\
    Traceback (most recent call last):
      File "/v/site-packages/vllm/a.py", line 1, in read
        json()
    KeyError: 'rope'

    The above exception was the direct cause of the following exception:

    Traceback (most recent call last):
      File "/v/bin/vllm", line 8, in <module>
        main()
    ValueError: no configuration

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
      File "/v/bin/vllm", line 8, in <module>
        main()
    OSError: gave up
    """
    found = root(text)
    assert found.text == "KeyError: 'rope'"
    assert found.chain == ("KeyError: 'rope'", "ValueError: no configuration", "OSError: gave up")
    assert (found.file, found.line) == ("vllm/a.py", 1)


def test_a_cause_without_frames_of_its_own_is_placed_by_what_it_was_raised_through():
    text = """\
    httpcore.ConnectError: [Errno 111] Connection refused

    The above exception was the direct cause of the following exception:

    httpx.ConnectError: [Errno 111] Connection refused

    The above exception was the direct cause of the following exception:

"""
    found = root(text + UNCAUGHT + "    OSError: offline\n")
    assert found.text == "httpcore.ConnectError: [Errno 111] Connection refused"
    assert len(found.chain) == 3
    assert found.file == "vllm/entrypoints/cli/main.py"


def test_tracebacks_of_several_processes_are_told_apart_line_by_line():
    def lines(process, text):
        return [f"({process}) {line}" for line in dedent(text).splitlines()]

    first = lines(
        "EngineCore pid=7",
        'Traceback (most recent call last):\n  File "/vllm/a.py", line 1, in f\n    x\nKeyError: 1\n',
    )
    other = lines(
        "Worker_TP1 pid=8",
        'Traceback (most recent call last):\n  File "/vllm/b.py", line 2, in g\n    y\nIndexError: 2\n',
    )
    mixed = [line for pair in zip(first, other, strict=True) for line in pair]
    assert (root("\n".join(mixed)).text, root("\n".join(mixed)).file) == ("KeyError: 1", "/vllm/a.py")
    assert root("\n".join(mixed[::-1][1::2][::-1] + mixed[::-1][::2][::-1])).text == "KeyError: 1"


def test_what_a_process_logs_in_between_does_not_break_its_traceback():
    lines = dedent(WORKER).splitlines()
    noise = "(Worker_TP3 pid=9) INFO 11-29 13:35:00 [shm.py:1] still here"
    other = "(Worker_TP3 pid=9) ERROR 11-29 13:35:00 [other.py:1] OSError: something else"
    mixed = [line for pair in zip(lines, [noise, other] * 4, strict=False) for line in pair]
    assert root("\n".join(mixed)).text == "ValueError: no weights"
    assert root("\n".join(mixed)).line == 42


def test_what_a_process_logs_while_it_prints_a_traceback_does_not_break_it():
    printed = [f"(EngineCore pid=7) {line}" for line in [*UNCAUGHT.splitlines(), "    OSError: no such model"]]
    logged = "(EngineCore pid=7) INFO 11-29 13:35:00 [shm.py:1] still here"
    mixed = dedent("\n".join(line.replace(") " + 4 * " ", ") ") for line in printed)).splitlines()
    assert root("\n".join(f"{line}\n{logged}" for line in mixed)).place.startswith("vllm/entrypoints/cli/main.py:120")


@pytest.mark.parametrize(
    "noise", ["get_mempolicy: Operation not permitted", "INFO:     127.0.0.1", "Triton is installed"]
)
def test_what_another_one_prints_in_between_is_not_taken_for_the_exception(noise):
    lines = [*UNCAUGHT.splitlines(), "    struct.error: no"]
    assert root("\n".join(f"{line}\n    {noise}" for line in lines)).text.startswith("struct.error: no")


def test_a_message_of_several_lines_is_kept_to_its_end():
    text = (
        UNCAUGHT
        + """\
    pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
      Value error, Invalid directory: '/models/none'.
    Please verify:
    1. That it exists. [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]
        For further information visit https://errors.pydantic.dev/2.14/v/value_error
    """
    )
    found = diagnosed(text)
    assert found.root.text.splitlines()[1:3] == ["  Value error, Invalid directory: '/models/none'.", "Please verify:"]
    assert found.root.chain[0].endswith("error for SpeculativeConfig: Value error, Invalid directory: '/models/none'.")
    assert "further information" not in found.root.text
    assert found.kind is Kind.CONFIGURATION


def test_what_follows_an_exception_is_not_its_message():
    after = "    Process EngineCore:\n    nanobind: leaked 3 types!\n"
    assert root(UNCAUGHT + "    OSError: no\n" + after).text == "OSError: no"
    logged = "    (APIServer pid=1) INFO 11-29 13:35:00 [a.py:1] x\n    (APIServer pid=1) later words\n"
    said = UNCAUGHT.replace("    ", "    (APIServer pid=1) ", 1).replace("\n      ", "\n    (APIServer pid=1)   ")
    assert root(said + "    (APIServer pid=1) OSError: no\n" + logged).text == "OSError: no"


def test_usage_errors_of_argparse():
    found = diagnosed(
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --port: invalid int value: 'x'\n"
    )
    assert found.root.text == "vllm serve: error: argument --port: invalid int value: 'x'"
    assert found.kind is Kind.CONFIGURATION


def test_a_syntax_error_has_its_place():
    text = (
        UNCAUGHT
        + '      File "/v/site-packages/vllm/x.py", line 3\n        def f(:\n              ^\n    SyntaxError: invalid syntax\n'
    )
    assert (root(text).text, root(text).file, root(text).line) == ("SyntaxError: invalid syntax", "vllm/x.py", 3)


def test_the_first_member_of_an_exception_group_is_the_root():
    text = """\
    Process EngineCore:
      + Exception Group Traceback (most recent call last):
      |   File "/v/bin/vllm", line 8, in <module>
      |     main()
      | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
      +-+---------------- 1 ----------------
        | Traceback (most recent call last):
        |   File "/v/site-packages/vllm/serve.py", line 5, in load
        |     raise ValueError
        | ValueError: first
        +---------------- 2 ----------------
        | TypeError: second
        +------------------------------------
    """
    found = root(text)
    assert (found.text, found.file) == ("ValueError: first", "vllm/serve.py")
    assert found.chain == (
        "ValueError: first",
        "TypeError: second",
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)",
    )


def test_what_another_process_raised_stands_inside_a_message():
    text = (
        UNCAUGHT
        + """\
    RuntimeError: Caught KeyError in DataLoader worker process 0.
    Original Traceback (most recent call last):
      File "/v/site-packages/vllm/data.py", line 4, in fetch
        x
    KeyError: 'a'
    """
    )
    assert root(text).text == "KeyError: 'a'"


def test_cpp_terminate_tells_what_was_thrown():
    text = """\
    terminate called after throwing an instance of 'c10::Error'
      what():  CUDA error: an illegal memory access was encountered
    CUDA kernel errors might be asynchronously reported at some other API call.
    Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
    frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98
    """
    found = collected(text)
    assert found.diagnose().root.text.startswith("c10::Error: CUDA error: an illegal memory access was encountered\n")
    assert found.dying


def test_a_crash_of_the_interpreter_has_the_frame_that_crashed():
    text = """\
    Fatal Python error: Segmentation fault

    Thread 0x00007f11 (most recent call first):
      File "/usr/lib/python3.11/threading.py", line 327 in wait

    Current thread 0x00007f12 (most recent call first):
      File "/v/site-packages/vllm/_custom_ops.py", line 12 in rms_norm
      File "/v/site-packages/vllm/worker.py", line 99 in execute_model

    Extension modules: numpy.core._multiarray_umath (total: 1)
    """
    found = root(text)
    assert found.text == "Fatal Python error: Segmentation fault"
    assert (found.file, found.line, found.function) == ("vllm/_custom_ops.py", 12, "rms_norm")
    assert found.innermost == "vllm/_custom_ops.py:12 in rms_norm"


@pytest.mark.parametrize(
    "line", ["Bus error (core dumped)", "Segmentation fault", "bash: line 1:    42 Killed   vllm serve"]
)
def test_a_shell_says_how_a_program_ended(line):
    assert root(line + "\n", ended="ended with exit code 1").text == line


@pytest.mark.parametrize(
    "line",
    ["collect2: error: ld returned 1 exit status", "gcc: error: unrecognized option", "Aborted the upload", "Killed"],
)
def test_what_other_programs_say_does_not_end_an_engine(line):
    assert not collected(line).dying
    assert diagnosed(line) is None


def test_what_nccl_warned_of_belongs_to_its_exception():
    text = """\
    (Worker_TP0 pid=5) host1:5:77 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9637892 bytes, error: No space left
    (Worker_TP0 pid=5) ERROR 11-29 13:35:00 [multiproc_executor.py:949] WorkerProc failed to start.
    (Worker_TP0 pid=5) ERROR 11-29 13:35:00 [multiproc_executor.py:949] Traceback (most recent call last):
    (Worker_TP0 pid=5) ERROR 11-29 13:35:00 [multiproc_executor.py:949]   File "/v/vllm/pynccl.py", line 4, in init
    (Worker_TP0 pid=5) ERROR 11-29 13:35:00 [multiproc_executor.py:949] RuntimeError: NCCL error: unhandled system error
    """
    found = root(text)
    assert found.text == "RuntimeError: NCCL error: unhandled system error"
    assert "failed to extend /dev/shm/nccl-a" in found.chain[-1]
    assert "NCCL WARN" not in "".join(root(WORKER, text).chain)


def test_a_warning_of_nccl_alone_does_not_fail_a_log():
    assert diagnosed("host1:5:77 [0] NCCL WARN Call to connect returned Connection refused, retrying\n") is None


def test_the_watchdog_of_collectives_ends_the_process():
    line = "[rank3]:[E1129 13:35:00.123 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    assert collected(line).dying
    assert root(line).text == line


def test_torch_marks_each_line_with_its_rank():
    def lines(rank, cause):
        text = f'Traceback (most recent call last):\n  File "/v/site-packages/vllm/a.py", line {rank}, in f\n{cause}'
        return [f"[rank{rank}]: {line}" for line in text.splitlines()]

    first = lines(1, "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93\nLast error:\nDuplicate GPU")
    other = lines(2, "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93\nLast error:\nsomething else")
    found = root("\n".join(line for pair in zip(first, other, strict=True) for line in pair))
    assert (found.process, found.place) == ("rank1", "vllm/a.py:1 in f")
    assert found.text.endswith("93\nLast error:\nDuplicate GPU")


def test_an_asynchronous_error_of_cuda_keeps_its_warning():
    text = WORKER.replace(
        "ValueError: no weights",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "    (Worker_TP3 pid=9) ERROR 11-29 13:35:00 [multiproc_executor.py:1063] CUDA kernel errors might be asynchronously reported",
    )
    assert root(text).text.endswith("CUDA kernel errors might be asynchronously reported")


KILLED = "(EngineCore pid=7) ERROR 11-29 13:35:01 [multiproc_executor.py:315] Worker proc VllmWorker-3 died unexpectedly (exit code: %s), shutting down executor.\n"
PEER = WORKER.replace("ValueError: no weights", "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:2048")
CANCELLED = WORKER.replace("ValueError: no weights", "RuntimeError: cancelled")


def test_a_worker_killed_without_words_wins_over_what_its_peers_noticed():
    for text in (PEER, CANCELLED):
        found = diagnosed(text, KILLED % "-9", ECHOES[ECHOES.rindex("    Traceback") :])
        assert "died unexpectedly (exit code: -9)" in found.root.text
        assert found.kind is Kind.KILLED


def test_what_was_raised_after_a_worker_was_killed_follows_from_it():
    raised = WORKER.replace("ValueError: no weights", "RuntimeError: NCCL error: unhandled system error")
    assert "died unexpectedly" in root(KILLED % "-9", raised).text
    assert "NCCL error" in root(raised, KILLED % "-9").text


def test_what_the_resource_tracker_misses_once_a_process_was_killed_is_no_cause():
    tracker = """\
    Traceback (most recent call last):
      File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 209, in main
        cache[rtype].remove(name)
    KeyError: '/psm_f7a0e5e2'
    """
    assert "died unexpectedly" in root(tracker, KILLED % "None", tracker).text
    killed = diagnosed(tracker, ended="VLLM::EngineCore (pid 77) died", kind=Kind.KILLED)
    assert killed.kind is Kind.KILLED
    assert diagnosed(tracker) is None


def test_a_cancelled_call_is_no_cause():
    assert "died unexpectedly" in root(ECHOES.replace("'no weights'", "'cancelled'")).text


def test_a_worker_that_is_gone_for_an_unknown_reason_gives_way_to_any_reason():
    assert root(KILLED % "None", WORKER).text == "ValueError: no weights"
    assert "died unexpectedly" in root(PEER, KILLED % "None").text


def test_a_lost_peer_is_told_where_nothing_else_was_said():
    assert "Connection closed by peer" in root(PEER, ECHOES[ECHOES.rindex("    Traceback") :]).text


def test_a_stop_that_was_asked_for_is_no_failure():
    text = UNCAUGHT + "    KeyboardInterrupt: terminated\n"
    assert diagnosed(text) is None
    assert diagnosed(KILLED % "-15") is None


def test_what_processes_say_of_one_another_once_a_stop_was_asked_for_is_no_failure():
    stop = "(APIServer pid=1) INFO 11-29 13:09:00 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    assert diagnosed(stop, ECHOES) is None
    assert not collected(stop, ECHOES).dying
    assert root(WORKER, ECHOES, stop).text == "ValueError: no weights"


def test_an_end_without_any_word_is_told_as_such():
    found = diagnosed("(APIServer pid=1) INFO 11-29 13:35:00 [a.py:1] up\n", ended="vllm serve was killed by SIGKILL")
    assert (found.root, found.kind, found.known) == (None, Kind.KILLED, False)
    assert diagnosed("", ended="vllm serve ended with exit code 3").kind is Kind.CRASH


CAUGHT = [
    WORKER.replace("ERROR", "WARNING"),
    WORKER.replace("WorkerProc hit an exception.", "Error in preprocessing prompt inputs"),
    "    ERROR:    Exception in ASGI application\n" + UNCAUGHT + "    ValueError: bad request\n",
    "    Exception ignored in: <function f at 0x7f>\n" + UNCAUGHT + "    ImportError: sys.meta_path is None\n",
    '    Task exception was never retrieved\n    Traceback (most recent call last):\n      File "a.py", line 1, in f\n    OSError: x\n',
]


@pytest.mark.parametrize("text", CAUGHT)
def test_what_was_caught_is_no_failure(text):
    assert diagnosed(text) is None


@pytest.mark.parametrize("text", CAUGHT)
def test_what_was_caught_never_wins_over_what_ended_it(text):
    assert root(text, WORKER.replace("pid=9", "pid=10"), ECHOES).text == "ValueError: no weights"
    assert root(text, WORKER.replace("pid=9", "pid=10"), ECHOES).pid == 10


def test_what_an_engine_outlives_did_not_end_it():
    printed = '    Traceback (most recent call last):\n      File "/vllm/a.py", line 1, in probe\n    OSError: no such device\n'
    assert root(printed).text == "OSError: no such device"
    assert diagnosed(printed, "INFO:     Application startup complete.\n") is None
    assert root(printed, "INFO:     Application startup complete.\n", WORKER, ECHOES).text == "ValueError: no weights"


def test_the_last_caught_error_is_told_where_the_end_was_silent():
    first, last = (f"(EngineCore pid=7) ERROR 11-29 13:35:0{n} [a.py:1] trouble {n}\n" for n in (1, 2))
    assert root(first, last, ended="vllm serve ended with exit code 1").text == "trouble 2"


def test_requests_dumped_by_the_engine_are_never_shown():
    dump = (
        "(EngineCore pid=7) ERROR 11-29 13:35:00 [dump_input.py:72] Dumping scheduler output: prompt_token_ids=[1, 2]\n"
    )
    assert "prompt_token_ids" not in str(diagnosed(dump, ended="vllm serve ended with exit code 1"))


def test_it_is_dying_once_the_cause_is_complete_and_not_before():
    lines = dedent(ECHOES).splitlines()
    assert not collected(WORKER).dying
    assert not collected(*lines[:4]).dying
    assert collected(*[line + "\n" for line in lines[:5]]).dying


def test_it_is_dying_once_the_main_process_has_raised():
    collector = collected(UNCAUGHT)
    assert not collector.dying
    collector = collected(UNCAUGHT + "    OSError: no such model\n")
    assert collector.dying


LOGGED = "    (APIServer pid=1) ERROR 11-29 13:35:00 [serving.py:9] "
CAUGHT_REQUEST = "".join(
    LOGGED + line + "\n" for line in ("Error in preprocessing prompt inputs", *dedent(UNCAUGHT).splitlines())
)
ASGI = "    ERROR:    Exception in ASGI application\n"
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)\n"


@pytest.mark.parametrize(
    "text",
    [
        CAUGHT_REQUEST + LOGGED + "NotImplementedError: Unknown part type: died unexpectedly\n",
        CAUGHT_REQUEST + LOGGED + "ValueError: Failed to parse 'EngineDeadError'\n",
        CAUGHT_REQUEST + LOGGED + "ValueError: Engine core initialization failed. See root cause above\n",
        CAUGHT_REQUEST + LOGGED + "ValueError: Watchdog caught collective operation timeout\n",
        (CAUGHT_REQUEST + LOGGED + "ValueError: x\n").replace("inputs", "'EngineCore failed to start.'"),
        LOGGED + "ValueError: Worker proc VllmWorker-3 died unexpectedly\n",
        LOGGED + "RuntimeError: 'Engine core initialization failed'\n",
        LOGGED + "the prompt was: Engine core initialization failed. See root cause above.\n",
        LOGGED + "Fatal Python error: hello\n",
        LOGGED + "terminate called without an active exception\n",
        UNCAUGHT.replace("in main", "in f") + "    ValueError: Failed to parse 'EngineDeadError'\n",
        ASGI + UNCAUGHT + "    ValueError: died unexpectedly\n",
        ASGI + UNCAUGHT + "    " + DEAD,
    ],
)
def test_what_is_quoted_or_was_caught_does_not_end_the_engine(text):
    assert not collected(text).dying


@pytest.mark.parametrize(
    "text",
    [
        CAUGHT_REQUEST.replace("Error in preprocessing prompt inputs", "AsyncLLM output_handler failed.")
        + LOGGED
        + DEAD,
        ASGI + "    Fatal Python error: Segmentation fault\n",
        ASGI + "    terminate called without an active exception\n",
    ],
)
def test_what_names_the_end_by_its_type_or_at_the_beginning_of_a_line_ends_the_engine(text):
    assert collected(text).dying


def test_a_traceback_whose_head_was_filtered_away_is_read():
    text = "\n".join(line for line in dedent(WORKER).splitlines() if "Traceback" not in line and "hit an" not in line)
    assert (root(text).text, root(text).line) == ("ValueError: no weights", 42)


def test_a_log_filtered_down_to_its_errors_is_read():
    assert root("ERROR 11-29 13:35:00 [core.py:1] ValueError: no weights\n").text == "ValueError: no weights"
    assert root("torch.OutOfMemoryError: CUDA out of memory.\n").text == "torch.OutOfMemoryError: CUDA out of memory."


def test_memory_is_bounded_whatever_is_said():
    collector = Collector(known=())
    lines = parse(dedent(WORKER) + "x" * 3000)
    for number in range(500):
        collector.feed(line._replace(process=f"W{number}", pid=number) for line in lines)
    assert len(collector._streams) <= 128
    assert sum(len(kept) for kept in collector._said.values()) <= 64
    assert len(collector._pids) <= 64
