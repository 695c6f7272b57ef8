// That the CPU carries out kernels for a GPU as a GPU would, and refuses what it cannot vouch for.
#include "standin/ptx.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

namespace gemini::standin {
namespace {

// The memory of the GPU: a word for each lane, where `%rd3` of a kernel points for its lane.
struct Words {
  alignas(128) std::array<uint32_t, kLanes> words{};

  // Runs instructions over one warp.
  void run(const std::string& instructions) {
    const std::string text = R"(
      .version 9.0
      .target sm_80
      .entry kernel(
        .param .align 8 .b8 kernel_param_0[8]
      )
      {
        .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [kernel_param_0];
        cvta.to.global.u64 %rd2, %rd1;
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %rd0, %r1, 4;
        add.s64 %rd3, %rd2, %rd0;
    )" + instructions + "\nret;\n}\n";
    auto* address = words.data();
    void* arguments[] = {static_cast<void*>(&address)};
    const auto begin = reinterpret_cast<uint64_t>(address);
    const FindMemory find_memory = [=](uint64_t of) {
      return of >= begin && of < begin + sizeof words ? MemoryRange{begin, begin + sizeof words}
                                                      : MemoryRange{};
    };
    const auto kernels = parse_ptx(text);
    ASSERT_EQ(kernels.size(), 1U);
    run_kernel(kernels[0], arguments, 1, kLanes, find_memory);
  }
};

TEST(Ptx, LanesPartAndMeetAgain) {
  Words memory;
  memory.run(R"(
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
    $again:
    add.s32 %r2, %r2, %r3;
    add.s32 %r3, %r3, 1;
    setp.le.s32 %p1, %r3, %r1;
    @%p1 bra $again;
    mov.u32 %r5, -1;
    redux.sync.max.u32 %r4, %r2, %r5;
    setp.lt.u32 %p2, %r1, 16;
    @!%p2 bra $end;
    st.global.u32 [%rd3], %r2;
    bra.uni $out;
    $end:
    st.global.u32 [%rd3], %r4;
    $out:
  )");
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    EXPECT_EQ(memory.words[lane], lane < 16 ? lane * (lane + 1) / 2 : 31 * 32 / 2) << lane;
  }
}

TEST(Ptx, NanOfArithmeticIsOneAndMovesKeepTheirs) {
  Words memory;
  memory.words.fill(0xff800123);
  memory.run(R"(
    ld.global.f32 %f1, [%rd3];
    add.rn.f32 %f2, %f1, 0f3F800000;
    setp.ge.u32 %p1, %r1, 16;
    selp.f32 %f3, %f2, %f1, %p1;
    st.global.f32 [%rd3], %f3;
  )");
  EXPECT_EQ(memory.words[0], 0xff800123);
  EXPECT_EQ(memory.words[31], 0x7fffffff);
}

TEST(Ptx, NarrowValuesKeepOrLoseTheirSign) {
  Words memory;
  memory.words.fill(0x80c0ffee);
  memory.run(R"(
    ld.global.u8 %rs1, [%rd3];
    cvt.s16.s8 %rs2, %rs1;
    cvt.s32.s16 %r2, %rs2;
    setp.lt.u32 %p1, %r1, 16;
    cvt.u32.u16 %r3, %rs1;
    selp.b32 %r4, %r2, %r3, %p1;
    st.global.u32 [%rd3], %r4;
  )");
  EXPECT_EQ(memory.words[0], 0xffffffee);
  EXPECT_EQ(memory.words[31], 0xee);
}

TEST(Ptx, VectorsAreReadAndWrittenWhole) {
  Words memory;
  for (uint32_t i = 0; i < kLanes; ++i) memory.words[i] = i;
  memory.run(R"(
    setp.ge.u32 %p1, %r1, 1;
    @%p1 ret;
    ld.global.ca.v4.f32 {%f1,%f2,%f3,%f4}, [%rd3+16];
    st.global.wb.v4.f32 [%rd3], {%f4,%f3,%f2,%f1};
  )");
  EXPECT_EQ(memory.words[0], 7U);
  EXPECT_EQ(memory.words[3], 4U);
  EXPECT_EQ(memory.words[4], 4U);
}

TEST(Ptx, LanesExchangeValues) {
  Words memory;
  memory.run(R"(
    shfl.sync.bfly.b32 %r2|%p1, %r1, 4, 31, -1;
    @%p1 st.global.u32 [%rd3], %r2;
  )");
  for (uint32_t lane = 0; lane < kLanes; ++lane) EXPECT_EQ(memory.words[lane], lane ^ 4) << lane;
}

struct Refused {
  const char* instructions;
  const char* why;
};

class PtxRefuses : public testing::TestWithParam<Refused> {};

TEST_P(PtxRefuses, WhatAGpuWouldPunishOrMayDoOtherwise) {
  Words memory;
  try {
    memory.run(GetParam().instructions);
    FAIL() << "carried out";
  } catch (const PtxError& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().why), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PtxRefuses,
    testing::Values(Refused{"mul.f32 %f1, %f2, %f3;", "unknown instruction: mul.f32"},
                    Refused{"div.approx.f32 %f1, %f2, %f3;", "unknown instruction"},
                    Refused{"add.rn.ftz.f32 %f1, %f2, %f3;", "unknown instruction"},
                    Refused{"ld.global.u32 %r2, [%rd3+2];", "not aligned"},
                    Refused{"ld.global.v2.f32 {%f1, %f2}, [%rd3];", "not aligned"},
                    Refused{"ld.global.u32 %r2, [%rd3+128];", "illegal address"},
                    Refused{"st.global.u32 [%rd3+4], %r1;", "illegal address"},
                    Refused{"bra nowhere;", "no label"},
                    Refused{"setp.lt.u32 %p1, %r1, 5;\n@%p1 redux.sync.max.u32 %r2, %r1, -1;",
                            "not the whole warp"}));

}  // namespace
}  // namespace gemini::standin
