#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/regex.h"

#include <pcre2.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {
namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;
// Per match; the patterns in use need a handful of steps a character.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimitKib = 64 << 10;
constexpr size_t kJitStackStart = 64 << 10;
constexpr size_t kJitStackMost = 16 << 20;

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct FreeStack {
  void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
};

std::unique_ptr<pcre2_match_context, FreeContext> NewContext() {
  std::unique_ptr<pcre2_match_context, FreeContext> context(pcre2_match_context_create(nullptr));
  CHECK(context != nullptr);
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_depth_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimitKib);
  return context;
}

}  // namespace

struct Regex::Program {
  std::unique_ptr<pcre2_code, FreeCode> code;
  std::unique_ptr<pcre2_match_context, FreeContext> context;
  bool jit = false;
};

Regex::Regex(std::unique_ptr<const Program> program) : program_(std::move(program)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

absl::StatusOr<Regex> Regex::Compile(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pattern of ", pattern.size(), " bytes, the limit is ", kMaxPatternBytes));
  }
  ASSIGN_OR_RETURN(const std::string translated, TranslateRegex(pattern));
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  // Ruby's ^ and $ always match at lines' ends.
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  PCRE2_SIZE at = 0;
  auto program = std::make_unique<Program>();
  program->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()),
                                    translated.size(), options, &error, &at, context.get()));
  if (program->code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the pattern \"", pattern, "\" does not compile: ", ErrorText(error)));
  }
  program->context = NewContext();
  // Without a JIT (a kernel that forbids it) the interpreter runs the same pattern.
  program->jit = pcre2_jit_compile(program->code.get(), PCRE2_JIT_COMPLETE) == 0;
  return Regex(std::move(program));
}

struct RegexMatcher::State {
  const Regex::Program* program;
  std::unique_ptr<pcre2_match_data, FreeData> data;
  // Only where a match outgrew the JIT's stack on the thread's own.
  std::unique_ptr<pcre2_match_context, FreeContext> context;
  std::unique_ptr<pcre2_jit_stack, FreeStack> stack;
};

RegexMatcher::RegexMatcher(const Regex& regex) : state_(std::make_unique<State>()) {
  state_->program = regex.program_.get();
  // Groups are not asked for, only where the match is.
  state_->data.reset(pcre2_match_data_create(1, nullptr));
  CHECK(state_->data != nullptr);
}

RegexMatcher::~RegexMatcher() = default;

absl::StatusOr<bool> RegexMatcher::Find(absl::string_view text, size_t from, size_t* begin,
                                        size_t* end) {
  const Regex::Program& program = *state_->program;
  const auto match = [&]() {
    pcre2_match_context* context =
        state_->context != nullptr ? state_->context.get() : program.context.get();
    const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data() == nullptr ? "" : text.data());
    return program.jit ? pcre2_jit_match(program.code.get(), subject, text.size(), from,
                                         PCRE2_NO_UTF_CHECK, state_->data.get(), context)
                       : pcre2_match(program.code.get(), subject, text.size(), from,
                                     PCRE2_NO_UTF_CHECK, state_->data.get(), context);
  };
  int rc = match();
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT && state_->stack == nullptr) {
    state_->stack.reset(pcre2_jit_stack_create(kJitStackStart, kJitStackMost, nullptr));
    CHECK(state_->stack != nullptr);
    state_->context = NewContext();
    pcre2_jit_stack_assign(state_->context.get(), nullptr, state_->stack.get());
    rc = match();
  }
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text is too hard for the tokenizer's pattern: ", ErrorText(rc)));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(state_->data.get());
  *begin = offsets[0];
  *end = offsets[1];
  return true;
}

}  // namespace carryover
