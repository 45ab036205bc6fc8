// A main for fuzz targets where there is no libFuzzer: runs every file of the given folders, then
// -runs=N mutations of them. The same arguments give the same inputs. A crash is the finding; the
// input that caused it is written to crash-input first.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

const std::string* current_input = nullptr;

void SaveCurrentInput() {
  if (current_input == nullptr) return;
  const int fd = open("crash-input", O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) return;
  if (write(fd, current_input->data(), current_input->size()) >= 0) {
    constexpr char kNote[] = "the input was written to crash-input\n";
    (void)!write(STDERR_FILENO, kNote, sizeof(kNote) - 1);
  }
  close(fd);
}

void OnSignal(int signal) {
  SaveCurrentInput();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void RunOne(const std::string& input) {
  current_input = &input;
  // A copy of exactly this size, so that AddressSanitizer sees a read past the end.
  std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  current_input = nullptr;
}

// Pieces that parsers trip over more often than over random bytes.
const std::vector<std::string>& Pieces() {
  static const std::vector<std::string> pieces = {"0",
                                                  "-1",
                                                  "1e999",
                                                  "18446744073709551616",
                                                  "9223372036854775807",
                                                  "2147483648",
                                                  "0.5",
                                                  "null",
                                                  "true",
                                                  "[]",
                                                  "{}",
                                                  "[",
                                                  "]",
                                                  "{",
                                                  "}",
                                                  ",",
                                                  ":",
                                                  "\"",
                                                  "\"\"",
                                                  "\\u0000",
                                                  "\\ud800",
                                                  "\xff",
                                                  std::string(1, '\0'),
                                                  std::string(64, '['),
                                                  std::string(8, '\xff')};
  return pieces;
}

std::string Mutate(std::string input, const std::vector<std::string>& seeds,
                   std::mt19937_64* random) {
  const auto below = [random](size_t n) { return n == 0 ? 0 : (*random)() % n; };
  for (size_t step = 0, steps = 1 + below(4); step < steps; ++step) {
    const size_t at = below(input.size() + 1);
    const size_t length = std::min<size_t>(input.size() - at, 1 + below(16));
    switch (below(7)) {
      case 0:
        if (at < input.size()) input[at] ^= static_cast<char>(1u << below(8));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(below(256));
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(at, input.substr(at, length));
        break;
      case 4:
        input.insert(at, Pieces()[below(Pieces().size())]);
        break;
      case 5:  // a number or a word gives way to a piece
        input.replace(at, length, Pieces()[below(Pieces().size())]);
        break;
      default: {  // the end of another seed
        const std::string& other = seeds[below(seeds.size())];
        input = input.substr(0, at) + other.substr(below(other.size() + 1));
      }
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  for (int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, OnSignal);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(SaveCurrentInput);
#endif
  long runs = 0;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "-runs=", 6) == 0) {
      runs = std::atol(argv[i] + 6);
    } else if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
        files.push_back(entry.path());
      }
    } else {
      files.emplace_back(argv[i]);
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> seeds;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (seeds.empty()) {
    std::fprintf(stderr, "no seed found\n");
    return 1;
  }
  for (const std::string& seed : seeds) RunOne(seed);
  std::mt19937_64 random(1);
  for (long i = 0; i < runs; ++i) RunOne(Mutate(seeds[random() % seeds.size()], seeds, &random));
  std::printf("%zu seeds, %ld mutations\n", seeds.size(), runs);
  return 0;
}
