// A server in the test's process whose answers a test can bend, to see what the client makes of
// them. Its "model" turns a prompt into tokens by a rule, so that a mixed-up answer shows.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "carryover/v1/cache.grpc.pb.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "carryover/v1/fidelity.grpc.pb.h"
#include "carryover/v1/versions.grpc.pb.h"

namespace carryover {

class FakeServer : public v1::Completions::CallbackService {
 public:
  static constexpr int kVocabulary = 5000;

  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    builder.RegisterService(&versions);
    builder.RegisterService(&cache);
    builder.RegisterService(&fidelity);
    server_ = builder.BuildAndStart();
    address = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeServer() override { Stop(); }
  void Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

  // Changes an event before it is sent; false drops it. Any thread.
  std::function<bool(const v1::CompleteRequest&, v1::CompleteEvent*)> bend;
  // What a stream ends with. Any thread.
  std::function<grpc::Status(const v1::CompleteRequest&)> status;

  struct Versions : v1::Versions::Service {
    std::function<grpc::Status(const v1::LoadRequest&, grpc::ServerWriter<v1::LoadEvent>*)> load;
    std::function<grpc::Status(grpc::ServerContext*, const v1::CalibrateRequest&,
                               grpc::ServerWriter<v1::CalibrateEvent>*)>
        calibrate;
    v1::ListVersionsResponse list;
    v1::PromoteRequest promoted;

    grpc::Status Load(grpc::ServerContext*, const v1::LoadRequest* request,
                      grpc::ServerWriter<v1::LoadEvent>* writer) override {
      return load(*request, writer);
    }
    grpc::Status Calibrate(grpc::ServerContext* context, const v1::CalibrateRequest* request,
                           grpc::ServerWriter<v1::CalibrateEvent>* writer) override {
      if (calibrate == nullptr) return {grpc::StatusCode::UNIMPLEMENTED, "no answer is set"};
      return calibrate(context, *request, writer);
    }
    grpc::Status List(grpc::ServerContext*, const v1::ListVersionsRequest*,
                      v1::ListVersionsResponse* response) override {
      *response = list;
      return grpc::Status::OK;
    }
    grpc::Status Promote(grpc::ServerContext*, const v1::PromoteRequest* request,
                         v1::PromoteResponse*) override {
      promoted = *request;
      return grpc::Status::OK;
    }
  };
  struct Cache : v1::Cache::Service {
    v1::EvictRequest evicted;
    v1::PinRequest pinned;

    grpc::Status Evict(grpc::ServerContext*, const v1::EvictRequest* request,
                       v1::EvictResponse* response) override {
      evicted = *request;
      response->set_blocks_evicted(3);
      return grpc::Status::OK;
    }
    grpc::Status Pin(grpc::ServerContext*, const v1::PinRequest* request,
                     v1::PinResponse* response) override {
      pinned = *request;
      response->set_tokens(48);
      return grpc::Status::OK;
    }
  };
  struct Fidelity : v1::Fidelity::Service {
    // Answers Evaluate; unset: UNIMPLEMENTED.
    std::function<grpc::Status(const v1::EvaluateRequest&, v1::EvaluateResponse*)> evaluate;

    grpc::Status Evaluate(grpc::ServerContext*, const v1::EvaluateRequest* request,
                          v1::EvaluateResponse* response) override {
      if (evaluate == nullptr) return {grpc::StatusCode::UNIMPLEMENTED, "no answer is set"};
      return evaluate(*request, response);
    }
  };
  Versions versions;
  Cache cache;
  Fidelity fidelity;
  std::string address;
  std::atomic<bool> gone{false};  // Tokenize is UNAVAILABLE
  std::atomic<int> live{0};       // streams that have not ended
  std::atomic<int> cancelled{0};  // streams that the client gave up
  std::atomic<int> started{0};

  // Token i of the answer to a prompt.
  static int32_t Token(const v1::CompleteRequest& request, int i) {
    uint64_t hash = 17 + i;
    for (int32_t id : request.tokens().ids()) hash = hash * 31 + static_cast<uint64_t>(id);
    return static_cast<int32_t>(hash % kVocabulary);
  }

  grpc::ServerUnaryReactor* Complete(grpc::CallbackServerContext* context,
                                     const v1::CompleteRequest* request,
                                     v1::CompleteResponse* response) override;
  grpc::ServerWriteReactor<v1::CompleteEvent>* CompleteStream(
      grpc::CallbackServerContext* context, const v1::CompleteRequest* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;

 private:
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace carryover
