"""The public gRPC API through reflection alone, as grpcurl does: no generated code."""

import sys

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

channel = grpc.insecure_channel(sys.argv[1])
database = ProtoReflectionDescriptorDatabase(channel)
services = database.get_services()
assert "trireme.generate.v1.Generation" in services, services
assert "grpc.health.v1.Health" in services, services
pool = descriptor_pool.DescriptorPool(database)
service = pool.FindServiceByName("trireme.generate.v1.Generation")


def call(name, **fields):
    method = service.methods_by_name[name]
    request = message_factory.GetMessageClass(method.input_type)(**fields)
    answer = message_factory.GetMessageClass(method.output_type)
    path = f"/{service.full_name}/{name}"
    kind = channel.unary_stream if name.endswith("Stream") else channel.unary_unary
    stub = kind(path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString)
    return stub(request, timeout=60)


assert call("Health").ready
assert call("Info").max_model_len > 0
ids = list(call("Tokenize", text="The capital of France is").ids)
assert len(ids) == 5, ids
reply = call("Generate", text="The capital of France is", parameters={"max_new_tokens": 8})
assert "Paris" in reply.text and reply.usage.completion_tokens == 8, reply
events = list(call("GenerateStream", text="The capital of France is", parameters={"max_new_tokens": 8}))
assert events[-1].finished.text == reply.text, (events[-1], reply)
assert sum(1 for event in events if event.HasField("token")) == 8
drawn = {"max_new_tokens": 20, "temperature": 1.0, "typical_p": 0.9, "seed": 7}
for constraint, texts in [
    ({"regex": "(ab){2}"}, {"abab"}),
    ({"choices": {"choices": ["yes", "no"]}}, {"yes", "no"}),
    ({"lark": 'start: "hi" | "hey"'}, {"hi", "hey"}),
    ({"json_schema": '{"enum": [1, "a"]}'}, {"1", '"a"'}),
]:
    reply = call("Generate", text="Say:", parameters=drawn | constraint)
    assert reply.text in texts and reply.finish_reason == 2, (constraint, reply)
try:
    call("Generate", text="a", parameters={"temperature": -1.0})
except grpc.RpcError as refused:
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT, refused
    assert "temperature" in refused.details(), refused
else:
    raise AssertionError("a bad temperature was accepted")
print("grpc client: all good")
