// How the libraries above the stand-in for NVIDIA's driver use it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/cuda_abi.h"
#include "own_calls.h"

namespace gemini::cuda_abi {

extern "C" {
#define STANDIN_DECLARE(member, symbol, parameters) \
  Result standin_driver_##member parameters __asm__(symbol);
GEMINI_CUDA_CALLS(STANDIN_DECLARE)
#undef STANDIN_DECLARE
}

inline constexpr Calls kDriver = [] {
  Calls calls;
#define STANDIN_SET(member, symbol, parameters) calls.member = &standin_driver_##member;
  GEMINI_CUDA_CALLS(STANDIN_SET)
#undef STANDIN_SET
  return calls;
}();

}  // namespace gemini::cuda_abi

namespace gemini::standin {

using cuda_abi::kDriver;

// Makes the context of the one GPU this thread's, as CUDA's runtime does at its first use.
inline void enter_context() {
  thread_local bool entered = false;
  if (entered) return;
  static const cuda_abi::Context context = [] {
    cuda_abi::Context retained = nullptr;
    (void)kDriver.init(0);
    (void)kDriver.retain(&retained, 0);
    return retained;
  }();
  (void)kDriver.push(context);
  entered = true;
}

// Has a stream call `work`, which uses (address, bytes) each of `ranges`.
inline cuda_abi::Result launch(cuda_abi::Stream stream, std::function<void()> work,
                               const std::vector<uint64_t>& ranges = {}) {
  enter_context();
  const auto run = [](void* data) {
    const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(data));
    (*own)();
  };
  auto given = std::make_unique<std::function<void()>>(std::move(work));
  const cuda_abi::Result result =
      standin_launch(stream, ranges.data(), ranges.size() / 2, run, given.get());
  if (result == cuda_abi::kSuccess) (void)given.release();
  return result;
}

// Waits for what a stream was given so far.
inline cuda_abi::Result await(cuda_abi::Stream stream) {
  enter_context();
  cuda_abi::Event event = nullptr;
  (void)kDriver.event_create(&event, cuda_abi::kEventDefault);
  (void)kDriver.event_record(event, stream);
  const cuda_abi::Result result = kDriver.event_synchronize(event);
  (void)kDriver.event_destroy(event);
  return result;
}

}  // namespace gemini::standin
