# Writes OUT, a C++ file that holds FILES (a list, with commas) as server/page_files.h says.
# A string literal may be short in some compilers, so the bytes go into arrays.
cmake_minimum_required(VERSION 3.25)
string(REPLACE "," ";" FILES "${FILES}")
set(arrays "")
set(table "")
set(number 0)
foreach(file ${FILES})
  file(READ "${file}" bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  get_filename_component(name "${file}" NAME)
  string(APPEND arrays "constexpr char kFile${number}[] = {${bytes} 0};\n")
  string(APPEND table "    {\"${name}\", absl::string_view(kFile${number}, ${size})},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(WRITE "${OUT}" "// Made from server/page/ by server/embed_page.cmake.
#include \"server/page_files.h\"

namespace carryover {
namespace {

${arrays}
constexpr PageFile kFiles[] = {
${table}};

}  // namespace

absl::Span<const PageFile> PageFiles() { return kFiles; }

}  // namespace carryover
")
