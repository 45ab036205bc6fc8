#include "engine/sentencepiece_model.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>

namespace carryover {

namespace {

using LoadFunction = const SentencePieceModel* (*)(const char*, size_t, bool, std::string*);

// Debian's libsentencepiece exports its own old copy of protobuf. Linked into one program with the
// protobuf that gRPC uses, the two bind to each other's symbols and crash. So the library is opened
// when a tokenizer.model is first read, in a scope of its own that is searched first.
LoadFunction FindLoader(std::string* error) {
  int flags = RTLD_NOW | RTLD_LOCAL;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // The sanitizers do not allow such a scope. Programs without another protobuf need none.
  if (dlsym(RTLD_DEFAULT, "_ZN6google8protobuf8internal13VerifyVersionEiiPKc") != nullptr) {
    *error = "builds with a sanitizer cannot read tokenizer.model in a program that uses protobuf";
    return nullptr;
  }
#else
  flags |= RTLD_DEEPBIND;
#endif
  // It lies next to the program, wherever that is.
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  std::string file(path, size > 0 ? static_cast<size_t>(size) : 0);
  file.resize(file.rfind('/') + 1);
  file += CARRYOVER_SENTENCEPIECE_MODULE;
  void* module = dlopen(file.c_str(), flags);
  void* load = module != nullptr ? dlsym(module, "CarryoverLoadSentencePiece") : nullptr;
  if (load == nullptr) *error = dlerror();
  return reinterpret_cast<LoadFunction>(load);
}

}  // namespace

std::unique_ptr<const SentencePieceModel> SentencePieceModel::Load(std::string_view serialized,
                                                                   bool prefix,
                                                                   std::string* error) {
  // Opened once and never closed.
  static std::string* const missing = new std::string;
  static const LoadFunction load = FindLoader(missing);
  if (load == nullptr) {
    *error = *missing;
    return nullptr;
  }
  return std::unique_ptr<const SentencePieceModel>(
      load(serialized.data(), serialized.size(), prefix, error));
}

}  // namespace carryover
