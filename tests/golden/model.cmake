# The forward pass against Hugging Face transformers (make_golden.py).
add_executable(model_golden_test model_golden_test.cc emulated_golden_test.cc cuda_golden_test.cc golden_mutants_test.cc
  golden_rounded.cc golden_reference.cc golden_runner.cc)
target_link_libraries(model_golden_test PRIVATE carryover_engine carryover_emulated GTest::gmock GTest::gtest_main
  nlohmann_json::nlohmann_json)
if(TARGET carryover_cuda)
  target_link_libraries(model_golden_test PRIVATE carryover_cuda)
endif()
target_compile_definitions(model_golden_test PRIVATE CARRYOVER_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
gtest_discover_tests(model_golden_test DISCOVERY_TIMEOUT 60 PROPERTIES LABELS golden)
