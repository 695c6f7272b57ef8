# Per-file flags of the Adam kernels. Set source properties in the directory that adds the sources.
#
# No contraction: fused multiply-adds stand only where element.inc writes them. errno and trapping
# math are off so that sqrt and selects vectorize; neither changes a result. psabi warns of passing
# vectors by value, which inlined functions do not; GCC 12 takes its own undefined vectors of
# <immintrin.h> for uninitialized ones.
set(GEMINI_ADAM_MATH -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi
  $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
if(GEMINI_SANITIZE)
  list(APPEND GEMINI_ADAM_MATH -O1)  # The same arithmetic, compiled in half of the time.
endif()
set(GEMINI_ADAM_DIR ${CMAKE_CURRENT_LIST_DIR})
file(GLOB GEMINI_ADAM_TEXT ${GEMINI_ADAM_DIR}/*.inc ${GEMINI_ADAM_DIR}/vec*.h)

set(GEMINI_ADAM_FLAGS_scalar "")
set(GEMINI_ADAM_FLAGS_neon "")
set(GEMINI_ADAM_FLAGS_avx2 "")
set(GEMINI_ADAM_FLAGS_avx512 "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(GEMINI_ADAM_FLAGS_avx2 -mavx2 -mfma)
  set(GEMINI_ADAM_FLAGS_avx512
    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)
endif()
foreach(isa scalar neon avx2 avx512)
  set_source_files_properties(${GEMINI_ADAM_DIR}/isa_${isa}.cpp PROPERTIES
    COMPILE_OPTIONS "${GEMINI_ADAM_MATH};${GEMINI_ADAM_FLAGS_${isa}}"
    OBJECT_DEPENDS "${GEMINI_ADAM_TEXT}")
endforeach()
# The scalars are computed here in double: contraction would change them too.
set_source_files_properties(${GEMINI_ADAM_DIR}/adam.cpp PROPERTIES
  COMPILE_OPTIONS "-ffp-contract=off")
# The GPU's bits are the CPU's: the arithmetic of element.inc as it stands, in its test on the CPU too.
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/tests/cpp/adam_cuda_block_test.cpp PROPERTIES
  COMPILE_OPTIONS "-ffp-contract=off" SKIP_PRECOMPILE_HEADERS ON OBJECT_DEPENDS "${GEMINI_ADAM_TEXT}")
if(GEMINI_HAVE_CUDA)
  if("${CMAKE_CUDA_FLAGS} $ENV{NVCC_PREPEND_FLAGS} $ENV{NVCC_APPEND_FLAGS}" MATCHES
     "fast.math|fmad=true|ftz=true|prec-(div|sqrt)=false")
    message(FATAL_ERROR "CUDA flags allow inexact arithmetic (${CMAKE_MATCH_0}): the Adam kernel would "
      "not give the CPU's bits; take them out of CMAKE_CUDA_FLAGS and NVCC_*_FLAGS")
  endif()
  set_source_files_properties(${GEMINI_ADAM_DIR}/adam_cuda.cu PROPERTIES
    COMPILE_OPTIONS "-fmad=false;-ftz=false;-prec-div=true;-prec-sqrt=true;-Xcompiler=-Wall"
    OBJECT_DEPENDS "${GEMINI_ADAM_TEXT}")
endif()
