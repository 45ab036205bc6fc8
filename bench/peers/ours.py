"""carryover-server for the side-by-sides, called over gRPC by what its reflection says."""

import pathlib

import grpc
import processes
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

COLD, WARM = "cold", "warm"  # salts: prompts that were never met, and those that were
MODEL = "smollm2"


class Service:
    """Calls a service's methods by name, with requests as dictionaries."""

    def __init__(self, address, name):
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 64 << 20)])
        self.pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(self.channel))
        self.service = self.pool.FindServiceByName(name)

    def method(self, name):
        """(callable of gRPC, class of the request)"""
        found = self.service.methods_by_name[name]
        request, answer = (message_factory.GetMessageClass(kind) for kind in (found.input_type, found.output_type))
        make = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        return make(f"/{self.service.full_name}/{name}", request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=answer.FromString), request


class Server:
    """A server of its own, without any version at first."""

    def __init__(self, program, folder, kv_cache_bytes, threads):
        self.process, completions, admin, http = processes.start_server(str(program), folder, kv_cache_bytes, threads)
        processes.wait_for_http(self.process, f"http://{http}/healthz")
        self.completions = Service(completions, "carryover.v1.Completions")
        self.versions = Service(admin, "carryover.v1.Versions")
        self.types = self.versions.pool.FindEnumTypeByName("carryover.v1.DType").values_by_name
        self.unary, self.request = self.completions.method("Complete")
        self.stream, _ = self.completions.method("CompleteStream")
        self.tokenize, self.text = self.completions.method("Tokenize")

    def precisions(self):
        """Of weights, that its contract knows: {"BF16", "FP32", ...}"""
        return {name.removeprefix("DTYPE_") for name in self.types}

    def load(self, path, version, precision):
        call, request = self.versions.method("Load")
        kind = self.types[f"DTYPE_{precision}"].number
        try:
            events = list(call(request(model=MODEL, version=version, path=str(pathlib.Path(path).resolve()), weights=kind)))
        except grpc.RpcError as error:
            raise processes.DemoError(f"the server does not load {path} in {precision}: {error.details()}")
        return events[-1].version

    def ask(self, version, tokens, new_tokens, salt, store=False):
        return self.request(model=MODEL, version=version, tokens={"ids": tokens}, max_tokens=new_tokens, temperature=0,
                            ignore_eos=True, cache={"reuse": 1, "salt": salt, "store": store})

    def complete(self, *arguments, **options):
        """A future of the response."""
        return self.unary.future(self.ask(*arguments, **options))

    def tokens_of(self, version, text):
        return list(self.tokenize(self.text(model=MODEL, version=version, text=text, add_special_tokens=False)).tokens)

    def stop(self):
        self.completions.channel.close()
        self.versions.channel.close()
        self.process.stop()


class Streams:
    """The server as load.py asks it."""

    name = "carryover"

    def __init__(self, server, version):
        self.server = server
        self.version = version

    def stream(self, tokens, new_tokens):
        for event in self.server.stream(self.server.ask(self.version, tokens, new_tokens, WARM, store=True)):
            if event.HasField("delta") and event.delta.token_ids:
                yield list(event.delta.token_ids)
