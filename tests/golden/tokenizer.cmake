# Ours against the reference tokenizers, id by id.
add_executable(tokenizer_dump tokenizer_dump.cc)
target_link_libraries(tokenizer_dump PRIVATE carryover_engine nlohmann_json::nlohmann_json)
