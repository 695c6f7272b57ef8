# Per-file flags of the Adam kernel. Set source properties in the directory that adds the sources.
#
# No contraction: fused multiply-adds stand only where kernel.inc writes them. errno and trapping
# math are off so that sqrt and selects vectorize; neither changes a result.
set(GEMINI_ADAM_MATH -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
set(GEMINI_ADAM_DIR ${CMAKE_CURRENT_LIST_DIR})

set(GEMINI_ADAM_AVX2 "")
set(GEMINI_ADAM_AVX512 "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(GEMINI_ADAM_AVX2 -mavx2 -mfma)
  set(GEMINI_ADAM_AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)
endif()

set_source_files_properties(${GEMINI_ADAM_DIR}/isa_scalar.cpp PROPERTIES
  COMPILE_OPTIONS "${GEMINI_ADAM_MATH}"
  OBJECT_DEPENDS ${GEMINI_ADAM_DIR}/kernel.inc)
set_source_files_properties(${GEMINI_ADAM_DIR}/isa_avx2.cpp PROPERTIES
  COMPILE_OPTIONS "${GEMINI_ADAM_MATH};${GEMINI_ADAM_AVX2}"
  OBJECT_DEPENDS ${GEMINI_ADAM_DIR}/kernel.inc)
set_source_files_properties(${GEMINI_ADAM_DIR}/isa_avx512.cpp PROPERTIES
  COMPILE_OPTIONS "${GEMINI_ADAM_MATH};${GEMINI_ADAM_AVX512}"
  OBJECT_DEPENDS ${GEMINI_ADAM_DIR}/kernel.inc)
# The scalars are computed here in double: contraction would change them too.
set_source_files_properties(${GEMINI_ADAM_DIR}/adam.cpp PROPERTIES
  COMPILE_OPTIONS "-ffp-contract=off")
