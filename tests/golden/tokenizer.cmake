# Ours against the reference tokenizers, id by id.
add_executable(tokenizer_dump tokenizer_dump.cc)
target_link_libraries(tokenizer_dump PRIVATE carryover_engine nlohmann_json::nlohmann_json)
add_test(NAME tokenizer_reference
  COMMAND ${CARRYOVER_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/tokenizer_reference.py
    --dump $<TARGET_FILE:tokenizer_dump> --cache ${CMAKE_SOURCE_DIR}/.cache/tokenizers)
set_tests_properties(tokenizer_reference PROPERTIES LABELS golden TIMEOUT 600 PROCESSORS 2)
