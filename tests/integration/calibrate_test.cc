// Calibration over the admin service of a real server, and the map that comes of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "engine/kv_map.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

using ::testing::HasSubstr;

class CalibrateServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    server_ = ServerProcess::Start(
        LoadEntry("demo", "S", DemoModel("2026-10")) +
        absl::StrCat("load { model: 'demo' version: 'T' path: '", DemoModel("2026-11"),
                     "' carry_from: 'S' weights: DTYPE_FP32 kv_dtype: DTYPE_FP32 } ") +
        "engine { kv_cache_bytes: 134217728 } fidelity { hold_out_rate: 0 sample_rate: 0 "
        "learning_sample_rate: 0 }");
    ASSERT_NE(server_, nullptr);
  }
  static v1::CalibrateRequest SomeRequest() {
    v1::CalibrateRequest request;
    request.set_model("demo");
    request.set_source("S");
    request.set_target("T");
    request.set_piece_tokens(64);
    std::string text;
    for (int i = 0; text.size() < 12000; ++i) {
      absl::StrAppend(&text, "And it came to pass in the year ", 7919 * i % 997, " that ",
                      i % 3 == 0 ? "the king spoke to the people. " : "they went up again. ");
    }
    request.add_texts(text);
    return request;
  }
  grpc::Status Calibrate(const v1::CalibrateRequest& request) {
    grpc::ClientContext context;
    auto reader = server_->versions().Calibrate(&context, request);
    v1::CalibrateEvent event;
    while (reader->Read(&event)) {
      switch (event.event_case()) {
        case v1::CalibrateEvent::kProgress:
          progress_.push_back(event.progress());
          break;
        case v1::CalibrateEvent::kCandidate:
          candidates_.push_back(event.candidate());
          break;
        case v1::CalibrateEvent::kMap:
          map_ = event.map();
          break;
        default:
          EXPECT_TRUE(map_.has_mapped()) << "the map is told before its file";
          file_ += event.piece();
      }
    }
    return reader->Finish();
  }

  std::unique_ptr<ServerProcess> server_;
  std::vector<v1::CalibrateProgress> progress_;
  std::vector<v1::CalibrateCandidate> candidates_;
  v1::KvMap map_;
  std::string file_;
};

TEST_F(CalibrateServiceTest, GivesAMapThatLoadTakes) {
  const grpc::Status status = Calibrate(SomeRequest());
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(candidates_.size(), 9u);
  EXPECT_EQ(candidates_[0].variant(), "direct");
  EXPECT_GT(map_.direct().tv(), map_.mapped().tv());
  ASSERT_FALSE(progress_.empty());
  EXPECT_EQ(progress_.back().phase(), "choose");
  EXPECT_EQ(progress_.back().done(), progress_.back().total());
  const auto parsed = ParseKvMap(file_, "streamed");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->Name(), map_.sha256());

  const std::string path =
      absl::StrCat(testing::TempDir(), "/carryover-calibrate-service-", getpid());
  ASSERT_TRUE(WriteFileAtomically(path, file_).ok());
  v1::LoadRequest load;
  load.set_model("demo");
  load.set_version("T2");
  load.set_path(DemoModel("2026-11"));
  load.add_carry_from("S");
  load.set_weights(v1::DTYPE_FP32);
  load.set_kv_dtype(v1::DTYPE_FP32);
  load.add_map(path);
  v1::Version loaded;
  const grpc::Status with = Load(*server_, load, &loaded);
  ASSERT_TRUE(with.ok()) << with.error_message();
  ASSERT_EQ(loaded.maps_size(), 1);
  EXPECT_EQ(loaded.maps(0).sha256(), map_.sha256());
  load.set_version("T3");
  load.set_distinct("another");
  const grpc::Status other = Load(*server_, load, &loaded);
  EXPECT_EQ(other.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(other.error_message(), HasSubstr("target"));
  unlink(path.c_str());
}

TEST_F(CalibrateServiceTest, NamesTheFieldThatIsWrong) {
  v1::CalibrateRequest request = SomeRequest();
  request.set_piece_tokens(8);
  request.set_max_tokens(0);
  EXPECT_EQ(Calibrate(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request = SomeRequest();
  request.clear_texts();
  EXPECT_EQ(Calibrate(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.add_texts("short");
  EXPECT_THAT(Calibrate(request).error_message(), HasSubstr("texts"));
  request = SomeRequest();
  request.set_source("none");
  EXPECT_EQ(Calibrate(request).error_code(), grpc::StatusCode::NOT_FOUND);
}

// The server lets go when its caller does: another calibration can begin.
TEST_F(CalibrateServiceTest, EndsWithItsCaller) {
  {
    grpc::ClientContext context;
    auto reader = server_->versions().Calibrate(&context, SomeRequest());
    v1::CalibrateEvent event;
    ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    while (reader->Read(&event)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  grpc::Status status;
  for (int i = 0; i < 100; ++i) {
    status = Calibrate(SomeRequest());
    if (status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(status.ok()) << status.error_message();
}

}  // namespace
}  // namespace carryover
