#include "server/config.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"
#include "engine/carry_plan.h"

namespace carryover {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;

constexpr size_t kMaxConfigBytes = 1 << 20;
constexpr double kMiB = 1 << 20;
constexpr double kTiB = kMiB * kMiB;

// Default and bounds of a numeric field: what config.proto documents.
struct NumberRule {
  const char* field;
  double fallback;
  double low;
  double high;
};

constexpr NumberRule kServerNumbers[] = {{"drain_timeout_seconds", 30, 0, 86400}};

constexpr NumberRule kEngineNumbers[] = {
    {"threads", 0, 0, 1024},
    {"kv_cache_bytes", 1024 * kMiB, kMiB, 16 * kTiB},
    {"host_cache_bytes", 0, 0, 16 * kTiB},
    {"block_tokens", 16, 16, 1024},
    {"max_running", 64, 1, 4096},
    {"step_tokens", 512, 1, 65536},
    {"max_waiting_requests", 1024, 1, 1e6},
    {"max_waiting_tokens", kMiB, 1, kTiB},
};

constexpr NumberRule kCacheNumbers[] = {
    {"min_carried_tokens", 16, 1, 1 << 30},
    {"source_share", 0.5, 0, 1},
    {"map_ahead_share", 0.25, 0, 1},
};

constexpr NumberRule kFidelityNumbers[] = {
    {"sample_rate", 0.1, 0, 1},        {"learning_sample_rate", 0.5, 0, 1},
    {"hold_out_rate", 0.05, 0, 1},     {"control_rate", 0.1, 0, 1},
    {"old_rate", 0.1, 0, 1},           {"rungs_rate", 0.1, 0, 1},
    {"positions", 16, 1, 16},          {"max_queue", 64, 0, 65536},
    {"max_age_seconds", 60, 0, 86400}, {"kv_share", 0.25, 0, 1},
    {"time_share", 0.02, 0, 1},
};

constexpr NumberRule kGateNumbers[] = {
    {"flip_limit", 0.02, 0.0001, 0.5},
    {"tv_limit", 0.05, 0.0001, 0.5},
    {"stop_limit", 0.02, 0.0001, 0.5},
    {"alpha", 0.05, 1e-6, 0.5},
    {"min_prefixes", 20, 1, 1000},
    {"min_completion", 0.5, 0, 1},
    {"cooldown_seconds", 600, 0, 1e6},
    {"max_cells", 1024, 1, 65536},
    {"state_interval_seconds", 60, 1, 86400},
};
constexpr int kMaxTasks = 64;
constexpr int kMaxLadder = 8;  // plans

constexpr NumberRule kLimitNumbers[] = {
    {"max_message_bytes", 16 * kMiB, 64 << 10, 1 << 30},
    {"max_prompt_tokens", 0, 0, 1 << 30},
    {"max_n", 16, 1, 1024},
    {"max_stop", 16, 0, 1024},
    {"max_stop_bytes", 256, 1, 65536},
    {"max_stop_token_ids", 64, 0, 65536},
    {"max_logit_bias", 300, 0, 65536},
    {"max_logprobs", 20, 0, 100},
    {"max_name_bytes", 256, 16, 4096},
    {"stream_queue_events", 1024, 16, 1 << 20},
    {"max_calls_per_connection", 1024, 1, 1 << 20},
    {"connection_memory_bytes", 1024 * kMiB, 16 * kMiB, 16 * kTiB},
};

// Syntax errors of the text, with their places.
class SyntaxErrors : public google::protobuf::io::ErrorCollector {
 public:
  SyntaxErrors(const std::string& name, std::vector<std::string>* errors)
      : name_(name), errors_(errors) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    errors_->push_back(absl::StrCat(name_, ":", line + 1, ":", column + 1, ": ", message));
  }

 private:
  const std::string& name_;
  std::vector<std::string>* errors_;
};

// A message being checked, and where its fields stand in the text.
class Checker {
 public:
  Checker(Message* message, TextFormat::ParseInfoTree* places, std::string path,
          const std::string& name, std::vector<std::string>* errors)
      : message_(message), places_(places), path_(std::move(path)), name_(name), errors_(errors) {}

  void Error(const char* field, absl::string_view text, int index = -1) {
    const FieldDescriptor* descriptor = message_->GetDescriptor()->FindFieldByName(field);
    int line = -1;
    if (places_ != nullptr) line = places_->GetLocation(descriptor, index).line;
    errors_->push_back(absl::StrCat(name_, line >= 0 ? absl::StrCat(":", line + 1) : "", ": ",
                                    path_, field, ": ", text));
  }

  // Checks the bounds of each number that was given, and fills in the default of the others.
  void Numbers(absl::Span<const NumberRule> rules) {
    const auto* reflection = message_->GetReflection();
    for (const NumberRule& rule : rules) {
      const FieldDescriptor* field = message_->GetDescriptor()->FindFieldByName(rule.field);
      CHECK(field != nullptr);
      if (!reflection->HasField(*message_, field)) {
        Set(field, rule.fallback);
        continue;
      }
      const double value = Get(field);
      if (!(value >= rule.low && value <= rule.high)) {
        Error(rule.field, absl::StrCat("must be from ", Plain(rule.low), " to ", Plain(rule.high)));
      }
    }
  }

  Checker Nested(const char* field, Message* nested, int index = -1) {
    const FieldDescriptor* descriptor = message_->GetDescriptor()->FindFieldByName(field);
    TextFormat::ParseInfoTree* places =
        places_ == nullptr ? nullptr : places_->GetTreeForNested(descriptor, index);
    std::string path =
        absl::StrCat(path_, field, index < 0 ? "" : absl::StrCat("[", index, "]"), ".");
    return Checker(nested, places, std::move(path), name_, errors_);
  }

 private:
  static std::string Plain(double value) {
    return value == std::floor(value) ? absl::StrCat(static_cast<int64_t>(value))
                                      : absl::StrCat(value);
  }

  double Get(const FieldDescriptor* field) const {
    const auto* reflection = message_->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection->GetInt32(*message_, field);
      case FieldDescriptor::CPPTYPE_INT64:
        return static_cast<double>(reflection->GetInt64(*message_, field));
      default:
        CHECK(field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE);
        return reflection->GetDouble(*message_, field);
    }
  }

  void Set(const FieldDescriptor* field, double value) {
    const auto* reflection = message_->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection->SetInt32(message_, field, static_cast<int32_t>(value));
      case FieldDescriptor::CPPTYPE_INT64:
        return reflection->SetInt64(message_, field, static_cast<int64_t>(value));
      default:
        CHECK(field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE);
        return reflection->SetDouble(message_, field, value);
    }
  }

  Message* message_;
  TextFormat::ParseInfoTree* places_;
  std::string path_;
  const std::string& name_;
  std::vector<std::string>* errors_;
};

// HOST:PORT, [IPV6]:PORT or unix:PATH; what is wrong with it, or "".
std::string AddressProblem(absl::string_view address, bool unix_allowed) {
  if (absl::ConsumePrefix(&address, "unix:")) {
    if (!unix_allowed) return "must be HOST:PORT";
    return address.empty() ? "names no path" : "";
  }
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return "must be HOST:PORT";
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return "has a port that is not from 0 to 65535";
  }
  const absl::string_view host = address.substr(0, colon);
  if (absl::StrContains(host, ':') && !(host.front() == '[' && host.back() == ']')) {
    return "must have its IPv6 address in brackets";
  }
  return "";
}

void CheckListen(v1::ServerConfig* config, Checker checker) {
  v1::Listen* listen = config->mutable_listen();
  if (listen->completions().empty()) listen->set_completions("127.0.0.1:50051");
  if (listen->admin().empty()) listen->set_admin("127.0.0.1:50052");
  if (listen->http().empty()) listen->set_http("127.0.0.1:8080");
  const std::pair<const char*, const std::string*> all[] = {{"completions", &listen->completions()},
                                                            {"admin", &listen->admin()},
                                                            {"http", &listen->http()}};
  for (const auto& [field, address] : all) {
    const std::string problem = AddressProblem(*address, absl::string_view(field) != "http");
    if (!problem.empty()) {
      checker.Error(field, absl::StrCat("\"", *address, "\" ", problem));
    } else if (!config->insecure() && !IsLoopback(*address)) {
      checker.Error(field, absl::StrCat("\"", *address,
                                        "\" can be reached from other machines and there is no "
                                        "TLS; listen on 127.0.0.1, or set insecure: true"));
    }
    for (const auto& [other_field, other] : all) {
      if (field < other_field && *address == *other && !absl::EndsWith(*address, ":0")) {
        checker.Error(other_field, absl::StrCat("is the same address as ", field));
      }
    }
  }
}

void CheckVersion(v1::StartVersion* version, Checker checker, const std::string& folder) {
  if (std::string problem = NameProblem(version->model()); !problem.empty()) {
    checker.Error("model", problem);
  }
  if (std::string problem = NameProblem(version->version()); !problem.empty()) {
    checker.Error("version", problem);
  }
  for (int i = 0; i < version->carry_from_size(); ++i) {
    if (std::string problem = NameProblem(version->carry_from(i)); !problem.empty()) {
      checker.Error("carry_from", problem, i);
    }
  }
  if (version->carry_from_size() > kMaxCarryFrom) {
    checker.Error("carry_from", absl::StrCat("has more than ", kMaxCarryFrom, " entries"), 0);
  }
  if (version->map_size() > kMaxCarryFrom) {
    checker.Error("map", absl::StrCat("has more than ", kMaxCarryFrom, " entries"), 0);
  }
  for (int i = 0; i < version->map_size(); ++i) {
    std::string* map = version->mutable_map(i);
    if (map->empty() || map->find('\0') != std::string::npos) {
      checker.Error("map", "is no path", i);
    } else {
      *map = (std::filesystem::path(folder) / *map).lexically_normal();
    }
  }
  if (version->path().empty()) {
    checker.Error("path", "is missing");
  } else if (version->path().find('\0') != std::string::npos) {
    checker.Error("path", "holds a zero byte");
  } else {
    version->set_path((std::filesystem::path(folder) / version->path()).lexically_normal());
  }
  if (version->has_promote() && !(version->promote() >= 0 && version->promote() <= 100)) {
    checker.Error("promote", "must be from 0 to 100");
  }
  for (const auto& [field, value] :
       {std::pair("weights", static_cast<int>(version->weights())),
        std::pair("kv_dtype", static_cast<int>(version->kv_dtype()))}) {
    if (!v1::DType_IsValid(value)) checker.Error(field, "is unknown");
  }
  if (version->kv_dtype() == v1::DTYPE_INT8) checker.Error("kv_dtype", "INT8 is for weights alone");
}

void CheckFidelity(v1::FidelityConfig* fidelity, Checker checker) {
  checker.Numbers(kFidelityNumbers);
  for (int i = 0; i < fidelity->tasks_size(); ++i) {
    if (std::string problem = NameProblem(fidelity->tasks(i)); !problem.empty()) {
      checker.Error("tasks", problem, i);
    } else if (fidelity->tasks(i) == "other") {
      checker.Error("tasks", "\"other\" stands for all that are not listed", i);
    }
  }
  if (fidelity->tasks_size() > kMaxTasks) {
    checker.Error("tasks", absl::StrCat("has more than ", kMaxTasks, " entries"), 0);
  }
  if (!v1::FidelityConfig::Refresh_IsValid(fidelity->refresh())) {
    checker.Error("refresh", "is unknown");
  }
  fidelity->set_refresh(fidelity->refresh());
}

void CheckGate(v1::GateConfig* gate, Checker checker, const std::string& folder) {
  namespace fs = std::filesystem;
  checker.Numbers(kGateNumbers);
  if (gate->ladder_size() > kMaxLadder) {
    checker.Error("ladder", absl::StrCat("has more than ", kMaxLadder, " entries"), 0);
  }
  std::set<std::string> plans;
  for (int i = 0; i < gate->ladder_size(); ++i) {
    if (const absl::Status status = CheckRung(gate->ladder(i)); !status.ok()) {
      checker.Error("ladder", std::string(status.message()), i);
    } else if (!plans.insert(gate->ladder(i)).second) {
      checker.Error("ladder", "stands there twice", i);
    }
  }
  if (gate->ladder_size() == 0) {
    for (const std::string& plan : GateConfig().ladder) gate->add_ladder(plan);
  }
  if (gate->state_file().empty()) return;
  if (gate->state_file().find('\0') != std::string::npos) {
    return checker.Error("state_file", "holds a zero byte");
  }
  const fs::path path = (fs::path(folder) / gate->state_file()).lexically_normal();
  gate->set_state_file(path);
  const fs::path parent = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code error;
  if (!path.has_filename() || fs::is_directory(path, error)) {
    checker.Error("state_file", absl::StrCat(path.string(), " is a folder"));
  } else if (fs::exists(path, error) && !fs::is_regular_file(path, error)) {
    checker.Error("state_file", absl::StrCat(path.string(), " is no regular file"));
  } else if (!fs::is_directory(parent, error)) {
    checker.Error("state_file", absl::StrCat("there is no folder ", parent.string()));
  } else if (access(parent.c_str(), W_OK | X_OK) != 0) {
    checker.Error("state_file", absl::StrCat("the folder ", parent.string(),
                                             " may not be written to: files are replaced there"));
  }
}

}  // namespace

bool IsLoopback(absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) return true;
  const absl::string_view host = address.substr(0, address.rfind(':'));
  if (host == "localhost" || host == "[::1]") return true;
  // 127.0.0.0/8, but not a name like 127.0.0.1.example.org.
  return absl::StartsWith(host, "127.") &&
         host.find_first_not_of("0123456789.") == absl::string_view::npos;
}

absl::StatusOr<v1::ServerConfig> ParseConfig(absl::string_view text, const std::string& name,
                                             const std::string& folder) {
  v1::ServerConfig config;
  std::vector<std::string> errors;
  SyntaxErrors syntax(name, &errors);
  TextFormat::ParseInfoTree places;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&syntax);
  parser.WriteLocationsTo(&places);
  if (!parser.ParseFromString(std::string(text), &config)) {
    return absl::InvalidArgumentError(absl::StrJoin(errors, "\n"));
  }

  Checker root(&config, &places, "", name, &errors);
  root.Numbers(kServerNumbers);
  // A message that was not in the text has no places in it.
  const bool has_engine = config.has_engine();
  const bool has_cache = config.has_cache();
  const bool has_limits = config.has_limits();
  const bool has_fidelity = config.has_fidelity();
  const bool has_gate = config.fidelity().has_gate();
  const bool has_listen = config.has_listen();
  const auto part = [&](bool present, const char* field, Message* message) {
    return present ? root.Nested(field, message)
                   : Checker(message, nullptr, absl::StrCat(field, "."), name, &errors);
  };
  Checker engine = part(has_engine, "engine", config.mutable_engine());
  engine.Numbers(kEngineNumbers);
  Checker cache = part(has_cache, "cache", config.mutable_cache());
  cache.Numbers(kCacheNumbers);
  part(has_limits, "limits", config.mutable_limits()).Numbers(kLimitNumbers);
  v1::FidelityConfig* const fidelity = config.mutable_fidelity();
  Checker fidelity_checker = part(has_fidelity, "fidelity", fidelity);
  CheckFidelity(fidelity, fidelity_checker);
  v1::GateConfig* const gate = fidelity->mutable_gate();
  CheckGate(gate,
            has_gate ? fidelity_checker.Nested("gate", gate)
                     : Checker(gate, nullptr, "fidelity.gate.", name, &errors),
            folder);
  CheckListen(&config, part(has_listen, "listen", config.mutable_listen()));

  if (!v1::EngineConfig::Backend_IsValid(config.engine().backend())) {
    engine.Error("backend", "is unknown");
  }
  config.mutable_engine()->set_backend(config.engine().backend());
  if (config.engine().block_tokens() % 16 != 0) {
    engine.Error("block_tokens", "must be a multiple of 16");
  }
  if (config.engine().step_tokens() < config.engine().max_running()) {
    engine.Error("step_tokens", "must not be less than max_running");
  }
  if (!v1::CacheConfig::WhenLearning_IsValid(config.cache().when_learning())) {
    cache.Error("when_learning", "is unknown");
  }
  config.mutable_cache()->set_when_learning(config.cache().when_learning());
  if (!config.cache().has_store_tainted()) config.mutable_cache()->set_store_tainted(true);
  if (config.log_level().empty()) config.set_log_level("info");
  const absl::string_view level = config.log_level();
  if (level != "debug" && level != "info" && level != "warning" && level != "error" &&
      level != "off") {
    root.Error("log_level", "must be debug, info, warning, error or off");
  }
  for (int i = 0; i < config.load_size(); ++i) {
    v1::StartVersion* version = config.mutable_load(i);
    CheckVersion(version, root.Nested("load", version, i), folder);
  }
  if (!errors.empty()) return absl::InvalidArgumentError(absl::StrJoin(errors, "\n"));
  return config;
}

absl::StatusOr<v1::ServerConfig> LoadConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConfigBytes));
  return ParseConfig(text, path, std::filesystem::path(path).parent_path());
}

std::string PrintConfig(const v1::ServerConfig& config) {
  TextFormat::Printer printer;
  printer.SetUseUtf8StringEscaping(true);
  std::string text;
  printer.PrintToString(config, &text);
  return text;
}

EngineOptions ToEngineOptions(const v1::ServerConfig& config) {
  const v1::EngineConfig& engine = config.engine();
  EngineOptions options;
  options.threads = engine.threads();
  options.kv_cache_bytes = engine.kv_cache_bytes();
  options.host_cache_bytes = engine.host_cache_bytes();
  options.block_tokens = engine.block_tokens();
  options.max_running = engine.max_running();
  options.step_tokens = engine.step_tokens();
  options.max_waiting_requests = engine.max_waiting_requests();
  options.max_waiting_tokens = engine.max_waiting_tokens();
  const v1::FidelityConfig& from = config.fidelity();
  FidelityOptions& fidelity = options.fidelity;
  fidelity.sample_rate = from.sample_rate();
  fidelity.learning_sample_rate = from.learning_sample_rate();
  fidelity.hold_out_rate = from.hold_out_rate();
  fidelity.control_rate = from.control_rate();
  fidelity.old_rate = from.old_rate();
  fidelity.rungs_rate = from.rungs_rate();
  fidelity.positions = from.positions();
  fidelity.max_queue = from.max_queue();
  fidelity.max_age_seconds = from.max_age_seconds();
  fidelity.kv_share = from.kv_share();
  fidelity.time_share = from.time_share();
  fidelity.store_native = from.refresh() != v1::FidelityConfig::NEVER;
  fidelity.refresh_when_idle = from.refresh() == v1::FidelityConfig::WHEN_IDLE;
  fidelity.tasks.assign(from.tasks().begin(), from.tasks().end());
  options.gate.limit = {from.gate().flip_limit(), from.gate().tv_limit(), from.gate().stop_limit()};
  options.gate.ladder.assign(from.gate().ladder().begin(), from.gate().ladder().end());
  options.gate.alpha = from.gate().alpha();
  options.gate.min_prefixes = from.gate().min_prefixes();
  options.gate.min_completion = from.gate().min_completion();
  options.gate.cooldown_seconds = from.gate().cooldown_seconds();
  options.gate.max_cells = from.gate().max_cells();
  options.gate.when_learning_carry = config.cache().when_learning() == v1::CacheConfig::CARRY;
  options.min_carried_tokens = config.cache().min_carried_tokens();
  options.store_tainted = config.cache().store_tainted();
  options.source_share = config.cache().source_share();
  options.map_ahead_share = config.cache().map_ahead_share();
  return options;
}

RequestLimits ToRequestLimits(const v1::ServerConfig& config) {
  const v1::Limits& from = config.limits();
  RequestLimits limits;
  limits.max_prompt_tokens = from.max_prompt_tokens();
  limits.max_n = from.max_n();
  limits.max_stop = from.max_stop();
  limits.max_stop_bytes = from.max_stop_bytes();
  limits.max_stop_token_ids = from.max_stop_token_ids();
  limits.max_logit_bias = from.max_logit_bias();
  limits.max_logprobs = from.max_logprobs();
  limits.max_name_bytes = from.max_name_bytes();
  return limits;
}

LoadOptions ToLoadOptions(const v1::StartVersion& version) {
  v1::LoadRequest request;
  request.set_model(version.model());
  request.set_version(version.version());
  request.set_path(version.path());
  *request.mutable_carry_from() = version.carry_from();
  *request.mutable_map() = version.map();
  request.set_distinct(version.distinct());
  request.set_weights(version.weights());
  request.set_kv_dtype(version.kv_dtype());
  return ToLoadOptions(request);
}

}  // namespace carryover
