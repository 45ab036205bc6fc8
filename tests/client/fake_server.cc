#include "tests/client/fake_server.h"

#include <deque>
#include <utility>

namespace carryover {
namespace {

v1::Usage UsageOf(const v1::CompleteRequest& request, int generated) {
  v1::Usage usage;
  const int prompt = request.has_tokens() ? request.tokens().ids_size()
                                          : static_cast<int>(request.prompt().size());
  usage.set_prompt_tokens(prompt);
  usage.set_cached_tokens(prompt / 2);
  usage.set_computed_tokens(prompt - prompt / 2);
  usage.set_completion_tokens(generated);
  usage.set_total_tokens(prompt + generated);
  return usage;
}

// All events of a well-behaved answer: token t has the text "t ".
std::deque<v1::CompleteEvent> Events(const v1::CompleteRequest& request) {
  std::deque<v1::CompleteEvent> events;
  auto* started = events.emplace_back().mutable_started();
  started->set_id("id-" + request.request_id());
  started->set_model("fake");
  started->set_version("v1");
  started->set_request_id(request.request_id());
  *started->mutable_usage() = UsageOf(request, 0);
  const int choices = request.has_n() ? request.n() : 1;
  const int tokens = request.has_max_tokens() ? request.max_tokens() : 16;
  for (int i = 0; i < tokens; ++i) {
    for (int choice = 0; choice < choices; ++choice) {
      auto* delta = events.emplace_back().mutable_delta();
      delta->set_index(choice);
      const int32_t token = FakeServer::Token(request, i);
      delta->add_token_ids(token);
      delta->set_text(std::to_string(token) + " ");
    }
  }
  for (int choice = 0; choice < choices; ++choice) {
    auto* finished = events.emplace_back().mutable_finished();
    finished->set_index(choice);
    finished->mutable_finish()->set_reason(v1::Finish::LENGTH);
  }
  *events.emplace_back().mutable_done()->mutable_usage() = UsageOf(request, tokens * choices);
  return events;
}

class Stream : public grpc::ServerWriteReactor<v1::CompleteEvent> {
 public:
  Stream(FakeServer* server, const v1::CompleteRequest& request)
      : server_(server), request_(request) {
    ++server_->live;
    ++server_->started;
    for (v1::CompleteEvent& event : Events(request_)) {
      if (!server_->bend || server_->bend(request_, &event)) events_.push_back(std::move(event));
    }
    Next();
  }
  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    events_.pop_front();
    Next();
  }
  void OnCancel() override { ++server_->cancelled; }
  void OnDone() override {
    --server_->live;
    delete this;
  }

 private:
  void Next() {
    if (!events_.empty()) {
      StartWrite(&events_.front());
    } else {
      Finish(server_->status ? server_->status(request_) : grpc::Status::OK);
    }
  }

  FakeServer* server_;
  v1::CompleteRequest request_;
  std::deque<v1::CompleteEvent> events_;
};

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const grpc::Status& status) {
  auto* reactor = context->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* FakeServer::Complete(grpc::CallbackServerContext* context,
                                               const v1::CompleteRequest* request,
                                               v1::CompleteResponse* response) {
  const int tokens = request->has_max_tokens() ? request->max_tokens() : 16;
  response->set_model("fake");
  response->set_version("v1");
  response->set_request_id(request->request_id());
  *response->mutable_usage() = UsageOf(*request, tokens);
  v1::Choice* choice = response->add_choices();
  for (int i = 0; i < tokens; ++i) {
    choice->add_token_ids(Token(*request, i));
    choice->mutable_text()->append(std::to_string(Token(*request, i)) + " ");
  }
  choice->mutable_finish()->set_reason(v1::Finish::LENGTH);
  return Answer(context, status ? status(*request) : grpc::Status::OK);
}

grpc::ServerWriteReactor<v1::CompleteEvent>* FakeServer::CompleteStream(
    grpc::CallbackServerContext* context, const v1::CompleteRequest* request) {
  return new Stream(this, *request);
}

grpc::ServerUnaryReactor* FakeServer::Tokenize(grpc::CallbackServerContext* context,
                                               const v1::TokenizeRequest* request,
                                               v1::TokenizeResponse* response) {
  if (gone) return Answer(context, {grpc::StatusCode::UNAVAILABLE, "gone"});
  for (unsigned char c : request->text()) {
    response->add_tokens(c);
    if (request->with_texts()) response->add_texts(std::string(1, static_cast<char>(c)));
  }
  return Answer(context, grpc::Status::OK);
}

grpc::ServerUnaryReactor* FakeServer::Detokenize(grpc::CallbackServerContext* context,
                                                 const v1::DetokenizeRequest* request,
                                                 v1::DetokenizeResponse* response) {
  for (int32_t token : request->tokens()) {
    if (token < 0 || token >= kVocabulary) {
      return Answer(context, {grpc::StatusCode::INVALID_ARGUMENT, "tokens[0] is out of range"});
    }
    response->mutable_text()->append(std::to_string(token) + " ");
  }
  return Answer(context, grpc::Status::OK);
}

}  // namespace carryover
