// carryover calibrate against the fake server, and the texts that it reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <thread>

#include "client/calibrate_texts.h"
#include "client/commands.h"
#include "tests/client/fake_server.h"

namespace carryover {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CalibrateCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/carryover-calibrate-" + std::to_string(getpid());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ + "/texts");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ + "/texts/" + name, std::ios::binary) << content;
  }
  int Run(std::vector<std::string> more = {}) {
    std::ostringstream out, err;
    std::vector<std::string> arguments = {"--model=m",
                                          "--source=s",
                                          "--target=t",
                                          "--texts=" + folder_ + "/texts",
                                          "--out=" + file(),
                                          "--address=" + server_.address,
                                          "--admin=" + server_.address};
    arguments.insert(arguments.end(), more.begin(), more.end());
    CommandContext context{
        .arguments = std::move(arguments), .out = out, .err = err, .interrupt = interrupt_};
    const int code = RunCalibrate(context);
    out_ = out.str();
    err_ = err.str();
    return code;
  }
  std::string file() const { return folder_ + "/map.safetensors"; }
  std::string Content() const {
    std::ifstream in(file(), std::ios::binary);
    std::stringstream content;
    content << in.rdbuf();
    return content.str();
  }

  FakeServer server_;
  Interrupt interrupt_;
  std::string folder_, out_, err_;
};

TEST_F(CalibrateCommandTest, WritesTheFileAndShowsWhatWasTried) {
  Write("b.txt", "second");
  Write("a.jsonl", "{\"text\":\"first\"}\n\n\"plain\"\n{\"prefix\":\"one \",\"suffix\":\"two\"}\n");
  Write("ignored.bin", "x");
  v1::CalibrateRequest seen;
  server_.versions.calibrate = [&](grpc::ServerContext*, const v1::CalibrateRequest& request,
                                   grpc::ServerWriter<v1::CalibrateEvent>* writer) {
    seen = request;
    v1::CalibrateEvent event;
    event.mutable_progress()->set_phase("fit");
    event.mutable_progress()->set_done(30);
    event.mutable_progress()->set_total(120);
    writer->Write(event);
    for (const auto& [tokens, tv] :
         {std::pair(0, 0.5), std::pair(60, 0.25), std::pair(120, 0.125)}) {
      auto* candidate = event.mutable_candidate();
      candidate->set_variant(tokens == 0 ? "direct" : "per_layer");
      candidate->set_tokens(tokens);
      candidate->set_lambda(0.001);
      candidate->mutable_quality()->set_tv(tv);
      writer->Write(event);
    }
    event.mutable_map()->set_variant("per_layer");
    event.mutable_map()->set_tokens(120);
    event.mutable_map()->mutable_direct()->set_tv(0.5);
    event.mutable_map()->mutable_mapped()->set_tv(0.125);
    writer->Write(event);
    event.set_piece("abc");
    writer->Write(event);
    event.set_piece("def");
    writer->Write(event);
    return grpc::Status::OK;
  };
  ASSERT_EQ(Run({"--piece-tokens=256"}), kExitOk) << err_;
  EXPECT_EQ(Content(), "abcdef");
  EXPECT_THAT(seen.texts(), ElementsAre("first", "plain", "one two", "second"));
  EXPECT_EQ(seen.source(), "s");
  EXPECT_EQ(seen.piece_tokens(), 256);
  EXPECT_FALSE(seen.has_max_tokens());
  EXPECT_THAT(err_, HasSubstr("fit      [######..................] 30 of 120"));
  EXPECT_THAT(out_, HasSubstr("TV 0.5000 without a map, 0.1250 with this one"));
  EXPECT_THAT(out_, HasSubstr("how much text is enough (per_layer, lambda 0.001)"));
  EXPECT_THAT(out_, HasSubstr("0.2500"));

  ASSERT_EQ(Run({"--json"}), kExitOk) << err_;
  const auto json = nlohmann::json::parse(out_);
  EXPECT_EQ(json["candidates"].size(), 3u);
  EXPECT_EQ(json["map"]["mapped"]["tv"], 0.125);
  EXPECT_EQ(json["bytes"], 6);
}

TEST_F(CalibrateCommandTest, WritesNothingWhenItFailsOrIsInterrupted) {
  Write("a.txt", "text");
  server_.versions.calibrate = [&](grpc::ServerContext*, const v1::CalibrateRequest&,
                                   grpc::ServerWriter<v1::CalibrateEvent>* writer) {
    v1::CalibrateEvent event;
    event.set_piece("abc");
    writer->Write(event);
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "texts: too little text");
  };
  EXPECT_EQ(Run(), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("too little text"));
  EXPECT_FALSE(std::filesystem::exists(file()));

  // The client does not wait for the server's handler, so the test has to.
  std::promise<bool> told;
  server_.versions.calibrate = [&](grpc::ServerContext* context, const v1::CalibrateRequest&,
                                   grpc::ServerWriter<v1::CalibrateEvent>*) {
    interrupt_.Trigger();
    for (int i = 0; i < 200 && !context->IsCancelled(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    told.set_value(context->IsCancelled());
    return grpc::Status::CANCELLED;
  };
  EXPECT_EQ(Run(), kExitInterrupted);
  EXPECT_THAT(err_, HasSubstr("interrupted"));
  EXPECT_TRUE(told.get_future().get());
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(CalibrateCommandTest, NamesWhatIsWrongWithTexts) {
  const auto problem = [&] {
    const auto read = ReadCalibrateTexts(folder_ + "/texts", 100);
    EXPECT_FALSE(read.ok());
    return std::string(read.status().message());
  };
  EXPECT_THAT(problem(), HasSubstr("holds no text"));
  Write("a.jsonl", "{\"text\":\"first\"}\n{\"txt\":1}\n");
  EXPECT_THAT(problem(), HasSubstr("a.jsonl:2"));
  Write("a.jsonl", "{\"text\":\"fir\n");
  EXPECT_THAT(problem(), HasSubstr("a.jsonl:1"));
  Write("a.jsonl", "");
  Write("b.txt", "\xff");
  EXPECT_THAT(problem(), HasSubstr("not UTF-8"));
  Write("b.txt", std::string(101, 'x'));
  EXPECT_THAT(problem(), HasSubstr("over 100 bytes"));
  EXPECT_FALSE(ReadCalibrateTexts(folder_ + "/none", 100).ok());
  EXPECT_EQ(Run({"--texts=" + folder_ + "/none"}), kExitUsage);
  EXPECT_EQ(Run({"--out="}), kExitUsage);
}

}  // namespace
}  // namespace carryover
