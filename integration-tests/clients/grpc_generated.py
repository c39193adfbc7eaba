"""The public gRPC API through stubs generated from the contract, as a Python program would use it.

    python grpc_generated.py HOST:PORT
"""

import importlib
import os
import sys
import tempfile

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from grpc_tools import protoc

HERE = os.path.dirname(os.path.abspath(__file__))
CONTRACT = os.path.join(HERE, "..", "..", "proto", "proto")
PROTO = "trireme/generate/v1/generate.proto"


def generated():
    """The modules of messages and stubs; a project would generate them once and keep them."""
    out = tempfile.mkdtemp()
    code = protoc.main(["protoc", f"-I{CONTRACT}", f"--python_out={out}", f"--grpc_python_out={out}", PROTO])
    assert code == 0, code
    sys.path.insert(0, out)
    name = "trireme.generate.v1.generate_pb2"
    return importlib.import_module(name), importlib.import_module(f"{name}_grpc")


pb, pb_grpc = generated()
channel = grpc.insecure_channel(sys.argv[1])
stub = pb_grpc.GenerationStub(channel)

health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
assert health.status == health_pb2.HealthCheckResponse.SERVING, health

reply = stub.Generate(
    pb.GenerateRequest(text="The capital of France is", parameters=pb.Parameters(max_new_tokens=8)), timeout=60)
assert "Paris" in reply.text, reply

# How likely is an answer? Only its own tokens are scored; the context may come from the cache.
context = stub.Tokenize(pb.TokenizeRequest(text="The capital of France is")).ids
score = {}
for answer in (" Paris", " London"):
    ids = stub.Tokenize(pb.TokenizeRequest(text="The capital of France is" + answer)).ids
    request = pb.ScoreRequest(ids=pb.TokenIds(ids=ids), start=len(context), top_logprobs=1)
    tokens = stub.Score(request, timeout=60).tokens
    assert [token.id for token in tokens] == list(ids), tokens
    assert not any(token.HasField("logprob") for token in tokens[:len(context)]), tokens
    score[answer] = sum(token.logprob for token in tokens[len(context):])
    # The likeliest token is the one that Generate took, and its logprob is one float.
    assert tokens[len(context)].top[0].text == " Paris", tokens
    if answer == " Paris":
        assert tokens[len(context)].rank == 1 and tokens[len(context)].top[0].logprob == tokens[len(context)].logprob
assert score[" Paris"] > score[" London"], score

# A bad request names the reason and the field.
try:
    stub.Score(pb.ScoreRequest(text="a", top_logprobs=21), timeout=60)
except grpc.RpcError as refused:
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT, refused
    details = {}
    for detail in rpc_status.from_call(refused).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest):
            if detail.Is(kind.DESCRIPTOR):
                details[kind] = kind()
                detail.Unpack(details[kind])
    assert details[error_details_pb2.ErrorInfo].reason == "INVALID_VALUE", details
    assert details[error_details_pb2.BadRequest].field_violations[0].field == "prompt_logprobs", details
else:
    raise AssertionError("21 candidates were taken")

# A deadline ends an answer that is not ready.
endless = pb.Parameters(max_new_tokens=4000, ignore_eos=True)
try:
    stub.Generate(pb.GenerateRequest(text="Once", parameters=endless), timeout=0.5)
except grpc.RpcError as late:
    assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED, late
else:
    raise AssertionError("4000 tokens came within half a second")

# A cancelled stream ends, and the server forgets it.
stream = stub.GenerateStream(pb.GenerateRequest(text="Once", parameters=endless))
assert next(stream).HasField("token")
stream.cancel()
try:
    for _ in stream:
        pass
except grpc.RpcError as ended:
    assert ended.code() == grpc.StatusCode.CANCELLED, ended
else:
    raise AssertionError("a cancelled stream ended by itself")
print("generated grpc client: all good")
