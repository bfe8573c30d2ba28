"""Against moto's server on loopback, and what stands between: a proxy that cuts, a server that is busy."""

import base64
import contextlib
import datetime as dt
import hashlib
import http.server
import ipaddress
import os
import socket
import socketserver
import ssl
import threading

import boto3
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from moto.server import ThreadedMotoServer
from sources_models import REVISION

from aerie.cache.manifest import MANIFEST
from aerie.cache.sources import s3
from aerie.cache.sources.opening import open_source
from aerie.cache.sources.s3 import S3Source
from aerie.cache.sources.source import Offer, SourceError, TryAgainError

SHARD = 12 * 2**20 + 4711
"""Bytes: moto takes its time over more."""
SECRET = "hunter2hunter2hunter2"  # noqa: S105


@pytest.fixture
def model(model):
    """The model with a shorter shard."""
    (model / "model-1.safetensors").write_bytes(os.urandom(SHARD))
    return model


@pytest.fixture(scope="module")
def store():
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    """Those of the environment alone."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def bucket(store, credentials, request):
    """A fresh bucket: its client and its name."""
    client = boto3.client("s3", endpoint_url=store, region_name="us-east-1")
    name = f"weights-{abs(hash(request.node.name)):x}"
    client.create_bucket(Bucket=name)
    yield client, name
    client.close()


@pytest.fixture
def opened(store):
    sources = []

    def open_(text, **options):
        sources.append(open_source(text, **({"revision": None, "endpoint": store} | options)))
        return sources[-1]

    yield open_
    for source in sources:
        source.close()


def upload(bucket, directory, prefix="kimi/"):
    client, name = bucket
    for path in directory.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), name, f"{prefix}{path.relative_to(directory).as_posix()}")


def test_a_prefix_is_listed_and_read_in_pieces(model, bucket, opened, store):
    upload(bucket, model)
    client, name = bucket
    client.put_object(Bucket=name, Key="kimi/", Body=b"")
    client.put_object(Bucket=name, Key="kimi/.cache/huggingface/x.lock", Body=b"")
    client.put_object(Bucket=name, Key="kimi-other/x", Body=b"x")
    source = opened(f"s3://{name}/kimi/")
    listing = source.list()
    assert listing.revision is None
    assert [(offer.path, offer.size) for offer in listing.files] == [
        ("code/a b's [1].py", 5),
        ("config.json", 27),
        ("model-1.safetensors", SHARD),
    ]
    pieces = list(source.read(listing.files[2], 5, 2**23 + 3))
    assert max(map(len, pieces)) <= 2**20
    with (model / "model-1.safetensors").open("rb") as file:
        file.seek(5)
        assert b"".join(pieces) == file.read(2**23 - 2)
    assert b"".join(source.read(listing.files[0], 0, 5)) == b"pass\n"
    assert source.description == f"s3://{name}/kimi"
    assert source.options == {"endpoint": store}


def test_more_objects_than_a_page_has_are_all_listed(bucket, opened, monkeypatch):
    client, name = bucket
    for number in range(5):
        client.put_object(Bucket=name, Key=f"{number}", Body=b"x")
    monkeypatch.setattr(s3, "_PAGE", 2)
    assert len(opened(f"s3://{name}").list().files) == 5


def test_a_published_prefix_gives_its_digests_and_its_files_alone(model, publish, bucket, opened):
    (model / "model-1.safetensors").unlink()
    manifest = publish(model)
    (model / "notes.txt").write_text("not the model's")
    upload(bucket, model)
    listing = opened(f"s3://{bucket[1]}/kimi", revision=REVISION).list()
    assert listing.revision == REVISION
    assert [(offer.path, offer.sha256) for offer in listing.files] == [
        (file.path, file.sha256) for file in manifest.files
    ]
    with pytest.raises(SourceError, match=f"holds revision {REVISION}"):
        opened(f"s3://{bucket[1]}/kimi", revision="f" * 40).list()


def test_a_models_whole_directory_is_the_revision_that_is_wanted(model, publish, bucket, opened):
    (model / "model-1.safetensors").unlink()
    publish(model)
    upload(bucket, model, f"kimi/{REVISION}/")
    text = f"s3://{bucket[1]}/kimi"
    source = opened(text)
    assert source.list().revision == REVISION
    other = "f" * 40
    publish(model, revision=other)
    bucket[0].upload_file(str(model / MANIFEST), bucket[1], f"kimi/{other}/{MANIFEST}")
    with pytest.raises(SourceError, match=f"several revisions .*{REVISION}.*--revision"):
        opened(text).list()
    assert opened(text, revision=REVISION).list().revision == REVISION
    with pytest.raises(SourceError, match="has no revision 0000"):
        opened(text, revision="0" * 40).list()
    upload(bucket, model, "kimi/current/")
    assert opened(text).list().revision == other


def test_a_manifest_that_is_none_is_refused(bucket, opened):
    bucket[0].put_object(Bucket=bucket[1], Key=f"kimi/{MANIFEST}", Body=b"\xff")
    with pytest.raises(SourceError, match="not one that Aerie wrote"):
        opened(f"s3://{bucket[1]}/kimi").list()


def test_the_stores_own_sha256_is_taken_where_it_is_of_the_whole(bucket, opened):
    client, name = bucket
    client.put_object(Bucket=name, Key="whole", Body=b"abc", ChecksumAlgorithm="SHA256")
    client.put_object(Bucket=name, Key="other", Body=b"abc", ChecksumAlgorithm="CRC32")
    found = {offer.path: offer.sha256 for offer in opened(f"s3://{name}").list().files}
    assert found == {"whole": hashlib.sha256(b"abc").hexdigest(), "other": None}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("FULL_OBJECT", base64.b64encode(bytes(32)).decode(), "00" * 32),
        (None, base64.b64encode(bytes(32)).decode(), "00" * 32),
        (None, base64.b64encode(bytes(32)).decode() + "-7", None),
        ("COMPOSITE", base64.b64encode(bytes(32)).decode(), None),
        ("FULL_OBJECT", "AAAA", None),
        ("FULL_OBJECT", "", None),
    ],
)
def test_a_sha256_of_parts_is_not_the_files(kind, value, expected):
    class Client:
        def head_object(self, **_arguments):
            return {"ETag": "e", "ChecksumSHA256": value} | ({"ChecksumType": kind} if kind else {})

    source = S3Source("weights", "")
    source._client = Client()
    assert source._digest({"Key": "x", "ETag": "e", "ChecksumAlgorithm": ["SHA256"]}) == expected


def test_an_object_that_changed_since_it_was_listed_is_refused(bucket, opened):
    client, name = bucket
    client.put_object(Bucket=name, Key="a", Body=b"abc")
    source = opened(f"s3://{name}")
    offer = source.list().files[0]
    client.put_object(Bucket=name, Key="a", Body=b"abd")
    with pytest.raises(SourceError, match=f"s3://{name}/a has changed since it was listed"):
        list(source.read(offer, 0, 3))
    client.delete_object(Bucket=name, Key="a")
    with pytest.raises(SourceError, match="is gone since it was listed"):
        list(source.read(offer, 0, 3))


def test_what_is_not_there_says_so(bucket, opened):
    with pytest.raises(SourceError, match=r"no bucket 'missing-bucket'; look at its name, and at --endpoint"):
        opened("s3://missing-bucket/x").list()
    with pytest.raises(SourceError, match="has nothing in it: is the prefix right"):
        opened(f"s3://{bucket[1]}/nothing").list()


def test_an_archived_object_is_named(bucket, opened):
    bucket[0].put_object(Bucket=bucket[1], Key="a", Body=b"abc", StorageClass="DEEP_ARCHIVE")
    with pytest.raises(SourceError, match=r"/a is archived \(DEEP_ARCHIVE\): restore it"):
        opened(f"s3://{bucket[1]}").list()


def test_without_credentials_a_bucket_is_taken_for_a_public_one(bucket, opened, monkeypatch):
    bucket[0].put_object(Bucket=bucket[1], Key="a", Body=b"abc", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    source = opened(f"s3://{bucket[1]}")
    assert b"".join(source.read(source.list().files[0], 0, 3)) == b"abc"


def test_half_of_the_credentials_and_a_missing_profile_say_so(opened, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceError, match="Partial credentials"):
        opened("s3://weights/x").list()
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(SourceError, match="profile \\(nowhere\\) could not be found"):
        opened("s3://weights/x").list()


@contextlib.contextmanager
def answering(status, body, headers=(), context=None):
    """A server that gives each request the same answer; yields its address and the requests' headers."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(dict(self.headers))
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_arguments: None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def refusal(code, message="x"):
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (403, "AccessDenied", r"may not be read with these credentials: they need s3:ListBucket .*\(AccessDenied: x\)"),
        (403, "InvalidAccessKeyId", "does not know the credentials: set AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "does not know the credentials"),
        (400, "ExpiredToken", "credentials have run out: renew them"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        (301, "PermanentRedirect", "in another region: set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "in another region: set AWS_REGION"),
        (501, "NotImplemented", "what answers is not S3"),
        (400, "Whatever", r"is refused \(Whatever: x\)"),
    ],
)
def test_a_refusal_says_what_to_do_and_no_secret(status, code, why, opened):
    with answering(status, refusal(code)) as (address, asked):
        with pytest.raises(SourceError, match=why) as raised:
            opened("s3://weights/x", endpoint=address).list()
        assert asked
    assert SECRET not in str(raised.value)


def test_a_refusal_without_credentials_says_that_there_were_none(opened, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with answering(403, refusal("AccessDenied")) as (address, asked):
        with pytest.raises(SourceError, match="not public, and no credentials were found: set AWS_ACCESS_KEY_ID"):
            opened("s3://weights/x", endpoint=address).list()
        assert "Authorization" not in asked[0]


def test_what_is_no_store_says_so(opened):
    with (
        answering(200, b"<html>Welcome</html>") as (address, _),
        pytest.raises(SourceError, match="is not S3"),
    ):
        opened("s3://weights/x", endpoint=address).list()


@pytest.mark.parametrize(
    ("status", "body", "after"),
    [
        (503, refusal("SlowDown"), 7.0),
        (500, refusal("InternalError"), 7.0),
        (429, b"", 7.0),
        (503, b"<html>busy</html>", 7.0),
        (400, refusal("RequestTimeout"), 7.0),
    ],
)
def test_a_store_that_is_busy_is_asked_again_by_who_called_alone(status, body, after, opened):
    with answering(status, body, [("Retry-After", "7")]) as (address, asked):
        with pytest.raises(TryAgainError, match="the store is busy or broken") as raised:
            opened("s3://weights/x", endpoint=address).list()
        assert raised.value.after == after
        assert len(asked) == 1


def test_a_store_that_is_not_there_is_tried_again(opened):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TryAgainError, match="Could not connect"):
            opened("s3://weights/x", endpoint=address).list()


@contextlib.contextmanager
def cutting(store, after):
    """A way to the store that is cut once so many bytes of an answer have passed; `after` may be changed."""
    host, port = store.removeprefix("http://").split(":")

    class Way(socketserver.BaseRequestHandler):
        def handle(self):
            with socket.create_connection((host, int(port))) as upstream:
                there = threading.Thread(target=pump, args=(self.request, upstream, None), daemon=True)
                there.start()
                pump(upstream, self.request, after["bytes"])
                there.join()

    def pump(source, target, limit):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data if limit is None else data[: limit - passed])
                passed += len(data)
                if limit is not None and passed >= limit:
                    break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Way) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()


def test_a_connection_that_is_cut_is_tried_again_after_what_it_brought(model, bucket, opened, store):
    upload(bucket, model)
    after = {"bytes": None}
    with cutting(store, after) as address:
        source = opened(f"s3://{bucket[1]}/kimi", endpoint=address)
        shard = source.list().files[2]
        source.close()
        for limit in (0, 100, 5_000_000):
            after["bytes"] = limit
            got = bytearray()
            again = opened(f"s3://{bucket[1]}/kimi", endpoint=address)
            again._connect()
            again._keys = source._keys
            with pytest.raises(TryAgainError, match=r"model-1\.safetensors"):
                keep(again.read(shard, 0, SHARD), got)
            again.close()
            assert len(got) <= limit
            assert limit < 2**20 or len(got) >= limit - 2**21
            with (model / "model-1.safetensors").open("rb") as file:
                assert got == file.read(len(got))


def keep(pieces, got):
    for piece in pieces:
        got += piece


def test_a_store_without_ranges_is_refused(opened):
    headers = [("ETag", '"e"')]
    with answering(200, b"0123456789", headers) as (address, _):
        source = S3Source("weights", "x", endpoint=address)
        source._connect()
        source._keys = {"a": "x/a"}
        with pytest.raises(SourceError, match="the store answered with 'the whole object'"):
            list(source.read(Offer("a", 10, version='"e"'), 2, 5))
        source.close()


def test_the_region_is_kept(opened):
    source = opened("s3://weights/x", endpoint="https://127.0.0.1:1", region="eu-central-1")
    assert source.options == {"endpoint": "https://127.0.0.1:1", "region": "eu-central-1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "us-east-1"), ({"AWS_DEFAULT_REGION": "a"}, "a"), ({"AWS_DEFAULT_REGION": "a", "AWS_REGION": "b"}, "b")],
)
def test_the_region_is_that_of_the_environment(variables, expected, opened, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    source = opened("s3://weights/x")
    source._connect()
    assert source._client.meta.region_name == expected


@pytest.fixture
def certificate(tmp_path):
    """A file with a certificate of 127.0.0.1 that nobody has signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "own.pem"
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(pem) + secret)
    return file


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "AWS_CA_BUNDLE"])
def test_an_authority_of_ones_own_is_named_by_a_variable(variable, certificate, opened, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with answering(404, refusal("NoSuchBucket"), context=context) as (address, _):
        with pytest.raises(SourceError, match=r"(?i)certificate verify failed.*SSL_CERT_FILE"):
            opened("s3://weights/x", endpoint=address).list()
        monkeypatch.setenv(variable, str(certificate))
        with pytest.raises(SourceError, match="no bucket 'weights'"):
            opened("s3://weights/x", endpoint=address).list()


def test_a_certificate_file_that_is_not_there_is_named(certificate, opened, monkeypatch, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with (
        answering(404, b"", context=context) as (address, _),
        pytest.raises(SourceError, match=r"No such file.*SSL_CERT_FILE"),
    ):
        opened("s3://weights/x", endpoint=address).list()
