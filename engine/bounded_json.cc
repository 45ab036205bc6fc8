#include "engine/bounded_json.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace carryover {
namespace {

using nlohmann::json;

// Builds the tree from the parser's events and stops it at the first thing that is not allowed.
class TreeBuilder : public nlohmann::json_sax<json> {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Put(nullptr) != nullptr; }
  bool boolean(bool value) override { return Put(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Put(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Put(value) != nullptr; }
  bool number_float(number_float_t value, const string_t& text) override {
    return Put(value) != nullptr;
  }
  bool string(string_t& value) override { return Put(std::move(value)) != nullptr; }
  bool binary(binary_t& value) override { return Fail("holds binary data"); }
  bool start_object(size_t count) override { return Open(json::object()); }
  bool start_array(size_t count) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& value) override {
    if (open_.back()->contains(value)) return Fail(absl::StrCat("has the key '", value, "' twice"));
    key_ = std::move(value);
    return true;
  }

  bool parse_error(size_t position, const std::string& last_token,
                   const nlohmann::json::exception& error) override {
    return Fail(absl::StrCat("is not valid JSON at byte ", position));
  }

  json root;
  std::string error;

 private:
  bool Fail(std::string what) {
    if (error.empty()) error = std::move(what);
    return false;
  }

  // Where the value now stands, or null. A pointer into an array stays good while it is used: its
  // array grows again only after the value itself is closed.
  json* Put(json value) {
    if (++values_ > limits_.max_values) {
      Fail(absl::StrCat("holds more than ", limits_.max_values, " values"));
      return nullptr;
    }
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    json* parent = open_.back();
    if (parent->is_array()) {
      parent->push_back(std::move(value));
      return &parent->back();
    }
    json& slot = (*parent)[key_];
    slot = std::move(value);
    return &slot;
  }

  bool Open(json container) {
    if (open_.size() >= limits_.max_depth) {
      return Fail(absl::StrCat("is nested deeper than ", limits_.max_depth, " levels"));
    }
    json* place = Put(std::move(container));
    if (place == nullptr) return false;
    open_.push_back(place);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits limits_;
  size_t values_ = 0;
  std::string key_;
  std::vector<json*> open_;
};

}  // namespace

absl::StatusOr<json> ParseBoundedJson(absl::string_view text, const JsonLimits& limits) {
  TreeBuilder builder(limits);
  if (!json::sax_parse(text.data(), text.data() + text.size(), &builder)) {
    return absl::InvalidArgumentError(builder.error.empty() ? "is not valid JSON" : builder.error);
  }
  return std::move(builder.root);
}

}  // namespace carryover
