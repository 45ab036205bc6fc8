"""A client that learns the services from the server's reflection alone: no generated code.

Usage: reflection_client.py ADDRESS. Exits with 0 when every check holds.
"""

import sys

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


class Service:
    """Calls the methods of a service by name, with fields as keyword arguments."""

    def __init__(self, channel, pool, name):
        self.channel = channel
        self.service = pool.FindServiceByName(name)

    def request(self, method, **fields):
        descriptor = self.service.methods_by_name[method].input_type
        return message_factory.GetMessageClass(descriptor)(**fields)

    def call(self, method, request, **options):
        found = self.service.methods_by_name[method]
        answer = message_factory.GetMessageClass(found.output_type)
        make = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        invoke = make(
            f"/{self.service.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return invoke(request, **options)


def main(address):
    channel = grpc.insecure_channel(address)
    database = ProtoReflectionDescriptorDatabase(channel)
    names = database.get_services()
    for name in (
        "carryover.v1.Completions",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ):
        assert name in names, (name, names)
    assert "carryover.v1.Versions" not in names, "admin calls have an address of their own"
    completions = Service(
        channel, descriptor_pool.DescriptorPool(database), "carryover.v1.Completions"
    )

    request = completions.request(
        "Complete", prompt="The sea", max_tokens=12, temperature=0, ignore_eos=True
    )
    whole = completions.call("Complete", request, timeout=30)
    assert whole.choices[0].text and len(whole.choices[0].token_ids) == 12, whole
    usage = whole.usage
    assert usage.prompt_tokens == (
        usage.cached_tokens + usage.carried_tokens + usage.repaired_tokens + usage.computed_tokens
    )

    events = list(completions.call("CompleteStream", request, timeout=30))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "done", kinds
    text = "".join(event.delta.text for event in events)
    assert text == whole.choices[0].text, (text, whole)

    tokens = completions.call("Tokenize", completions.request("Tokenize", text="The sea"))
    back = completions.call("Detokenize", completions.request("Detokenize", tokens=tokens.tokens))
    assert back.text == "The sea", back

    # Zero was sent and is not a default: top_p may not be 0.
    try:
        completions.call("Complete", completions.request("Complete", prompt="x", top_p=0))
        raise AssertionError("top_p 0 was accepted")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        assert "top_p" in error.details(), error
        trailers = {item.key for item in error.trailing_metadata()}
        assert "grpc-status-details-bin" in trailers, trailers
    print("ok:", repr(text))


if __name__ == "__main__":
    main(sys.argv[1])
