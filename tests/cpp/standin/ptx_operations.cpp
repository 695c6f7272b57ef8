#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <type_traits>
#include <utility>

#include "ptx.h"

namespace gemini::standin {
namespace {

constexpr uint32_t kNan = 0x7fffffff;             // that of arithmetic
constexpr uint32_t kUnspecifiedNan = 0xffc01234;  // where PTX does not say which

// -- values --

template <class T>
T read(uint64_t bits) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(static_cast<uint32_t>(bits));
  if constexpr (std::is_same_v<T, bool>) return bits != 0;
  return static_cast<T>(bits);
}

template <class T>
uint64_t written(T value) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<uint32_t>(value);
  return static_cast<uint64_t>(value);  // signed ones fill the register with their sign
}

float nan_made_one(float value) { return std::isnan(value) ? std::bit_cast<float>(kNan) : value; }

// -- one instruction over the lanes --

// to[0] = kFunction(from[0], ...), of types A..., giving an R.
template <auto kFunction, class R, class... A>
void each_lane(Warp& warp, const Instruction& it) {
  Lanes& to = warp.registers[static_cast<size_t>(it.to[0])];
  [&]<size_t... I>(std::index_sequence<I...>) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if ((warp.mask >> lane & 1) == 0) continue;
      to[lane] =
          written<R>(kFunction(read<A>(warp.registers[static_cast<size_t>(it.from[I])][lane])...));
    }
  }(std::index_sequence_for<A...>{});
}

template <auto kFunction, class T, class R = T>
constexpr Operation kUnary = &each_lane<kFunction, R, T>;
template <auto kFunction, class T, class R = T>
constexpr Operation kBinary = &each_lane<kFunction, R, T, T>;

// The memory of one lane's access.
char* memory_at(Warp& warp, uint64_t address, size_t nbytes, const Instruction& it) {
  if (address % nbytes != 0) throw PtxError("address not aligned: " + it.text);
  if (address < warp.last_found.begin || address + nbytes > warp.last_found.end) {
    warp.last_found = (*warp.find_memory)(address);
    if (address + nbytes > warp.last_found.end) throw PtxError("illegal address: " + it.text);
  }
  return reinterpret_cast<char*>(address);
}

// `kArgument`: of memory that holds the arguments of the launch.
template <class T, int kCount, bool kArgument = false>
void load(Warp& warp, const Instruction& it) {
  const Lanes addresses = warp.registers[static_cast<size_t>(it.from[0])];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if ((warp.mask >> lane & 1) == 0) continue;
    const uint64_t address = addresses[lane] + static_cast<uint64_t>(it.offset);
    const char* const memory = kArgument ? reinterpret_cast<const char*>(address)
                                         : memory_at(warp, address, kCount * sizeof(T), it);
    T values[kCount];
    std::memcpy(values, memory, sizeof values);
    for (size_t i = 0; i < kCount; ++i) {
      warp.registers[static_cast<size_t>(it.to[i])][lane] = written<T>(values[i]);
    }
  }
}

template <class T, int kCount>
void store(Warp& warp, const Instruction& it) {
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if ((warp.mask >> lane & 1) == 0) continue;
    const auto value = [&](size_t i) {
      return warp.registers[static_cast<size_t>(it.from[i])][lane];
    };
    T values[kCount];
    for (size_t i = 0; i < kCount; ++i) values[i] = read<T>(value(i + 1));
    const uint64_t address = value(0) + static_cast<uint64_t>(it.offset);
    std::memcpy(memory_at(warp, address, sizeof values, it), values, sizeof values);
  }
}

// The lanes that take part are the last operand, here always all.
void check_whole_warp(const Warp& warp, const Instruction& it) {
  for (const uint64_t members : warp.registers[static_cast<size_t>(it.from.back())]) {
    if (warp.mask != kWholeWarp || static_cast<uint32_t>(members) != kWholeWarp) {
      throw PtxError("not the whole warp meets: " + it.text);
    }
  }
}

void largest_of_warp(Warp& warp, const Instruction& it) {
  check_whole_warp(warp, it);
  const Lanes& values = warp.registers[static_cast<size_t>(it.from[0])];
  warp.registers[static_cast<size_t>(it.to[0])].fill(*std::ranges::max_element(values));
}

// Each lane gets the value of the one whose number has other bits where from[1] has ones.
void shuffle_across(Warp& warp, const Instruction& it) {
  check_whole_warp(warp, it);
  const Lanes values = warp.registers[static_cast<size_t>(it.from[0])];
  const Lanes& other = warp.registers[static_cast<size_t>(it.from[1])];
  const Lanes& clamp = warp.registers[static_cast<size_t>(it.from[2])];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (clamp[lane] != kLanes - 1) throw PtxError("not all lanes: " + it.text);
    warp.registers[static_cast<size_t>(it.to[0])][lane] = values[(lane ^ other[lane]) % kLanes];
  }
  warp.registers[static_cast<size_t>(it.to[1])].fill(1);  // whether there is such a lane
}

// -- the table --

using Table = std::map<std::string, Operation, std::less<>>;

template <class T>
void add_memory(Table& table, const std::string& type) {
  table["ld.param." + type] = &load<T, 1, true>;
  table["ld." + type] = &load<T, 1>;
  table["ld.v2." + type] = &load<T, 2>;
  table["ld.v4." + type] = &load<T, 4>;
  table["st." + type] = &store<T, 1>;
  table["st.v2." + type] = &store<T, 2>;
  table["st.v4." + type] = &store<T, 4>;
}

template <class T>
void add_moves(Table& table, const std::string& type) {
  constexpr auto kSame = [](T value) { return value; };
  constexpr auto kSelect = [](T yes, T no, bool which) { return which ? yes : no; };
  table["mov." + type] = kUnary<kSame, T>;
  table["selp." + type] = &each_lane<kSelect, T, T, T, bool>;
}

template <class T>
void add_comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = kBinary<std::equal_to<T>{}, T, bool>;
  table["setp.lt." + type] = kBinary<std::less<T>{}, T, bool>;
  table["setp.le." + type] = kBinary<std::less_equal<T>{}, T, bool>;
  table["setp.gt." + type] = kBinary<std::greater<T>{}, T, bool>;
  table["setp.ge." + type] = kBinary<std::greater_equal<T>{}, T, bool>;
  // For floats true only of numbers: `!=` is true of NaN too, and is PTX's neu.
  table["setp.ne." + type] = kBinary<[](T a, T b) { return a < b || b < a; }, T, bool>;
}

template <class T>
void add_integers(Table& table, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  add_memory<T>(table, type);
  add_moves<T>(table, type);
  add_comparisons<T>(table, type);
  table["add." + type] = kBinary<[](U a, U b) { return static_cast<T>(a + b); }, U, T>;
  table["sub." + type] = kBinary<[](U a, U b) { return static_cast<T>(a - b); }, U, T>;
  table["mul.lo." + type] = kBinary<[](U a, U b) { return static_cast<T>(uint64_t{a} * b); }, U, T>;
  table["min." + type] = kBinary<[](T a, T b) { return a < b ? a : b; }, T>;
  table["max." + type] = kBinary<[](T a, T b) { return a < b ? b : a; }, T>;
  constexpr auto kRight = [](T value, uint32_t count) {
    const T all = value < T{0} ? static_cast<T>(~T{0}) : T{0};
    return count >= kBits ? all : static_cast<T>(value >> count);
  };
  table["shr." + type] = &each_lane<kRight, T, T, uint32_t>;
}

template <class T>
void add_bits(Table& table, const std::string& type) {
  add_moves<T>(table, type);
  table["and." + type] = kBinary<std::bit_and<T>{}, T>;
  table["or." + type] = kBinary<std::bit_or<T>{}, T>;
  table["xor." + type] = kBinary<std::bit_xor<T>{}, T>;
  table["not." + type] = kUnary<[](T a) { return static_cast<T>(~a); }, T>;
  constexpr auto kLeft = [](T value, uint32_t count) {
    return count >= 8 * sizeof(T) ? T{0} : static_cast<T>(uint64_t{value} << count);
  };
  table["shl." + type] = &each_lane<kLeft, T, T, uint32_t>;
}

template <class From, class To>
void add_conversion(Table& table, const std::string& from, const std::string& to) {
  table["cvt." + to + "." + from] =
      kUnary<[](From value) { return static_cast<To>(value); }, From, To>;
}

template <class From>
void add_conversions(Table& table, const std::string& from) {
  add_conversion<From, int8_t>(table, from, "s8");
  add_conversion<From, int16_t>(table, from, "s16");
  add_conversion<From, int32_t>(table, from, "s32");
  add_conversion<From, int64_t>(table, from, "s64");
  add_conversion<From, uint8_t>(table, from, "u8");
  add_conversion<From, uint16_t>(table, from, "u16");
  add_conversion<From, uint32_t>(table, from, "u32");
  add_conversion<From, uint64_t>(table, from, "u64");
  table["cvt.rn.f32." + from] =
      kUnary<[](From value) { return static_cast<float>(value); }, From, float>;
}

// To the nearest, NaN always the same. Without ".rn" a sum or product might be contracted.
void add_floats(Table& table) {
  add_memory<float>(table, "f32");
  add_moves<float>(table, "f32");
  add_comparisons<float>(table, "f32");
  using F = float;
  table["add.rn.f32"] = kBinary<[](F a, F b) { return nan_made_one(a + b); }, F>;
  table["sub.rn.f32"] = kBinary<[](F a, F b) { return nan_made_one(a - b); }, F>;
  table["mul.rn.f32"] = kBinary<[](F a, F b) { return nan_made_one(a * b); }, F>;
  table["div.rn.f32"] = kBinary<[](F a, F b) { return nan_made_one(a / b); }, F>;
  table["sqrt.rn.f32"] = kUnary<[](F a) { return nan_made_one(std::sqrt(a)); }, F>;
  constexpr auto kFma = [](F a, F b, F c) { return nan_made_one(std::fma(a, b, c)); };
  table["fma.rn.f32"] = &each_lane<kFma, F, F, F, F>;
  table["neg.f32"] =
      kUnary<[](F a) { return std::isnan(a) ? std::bit_cast<float>(kUnspecifiedNan) : -a; }, F>;
  constexpr auto kMax = [](F a, F b) {
    if (a == b) return std::signbit(a) ? b : a;  // +0 is larger than -0
    return nan_made_one(std::fmax(a, b));
  };
  table["max.f32"] = kBinary<kMax, F>;
  table["setp.geu.f32"] = kBinary<[](F a, F b) { return !(a < b); }, F, bool>;
  table["setp.num.f32"] = kBinary<[](F a, F b) { return !std::isunordered(a, b); }, F, bool>;
}

// The low 32 bits from the last to the first.
uint32_t bits_reversed(uint32_t value) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (value >> i & 1) << (31 - i);
  return reversed;
}

Table make_table() {
  Table table;
  add_integers<int8_t>(table, "s8");
  add_integers<int16_t>(table, "s16");
  add_integers<int32_t>(table, "s32");
  add_integers<int64_t>(table, "s64");
  add_integers<uint8_t>(table, "u8");
  add_integers<uint16_t>(table, "u16");
  add_integers<uint32_t>(table, "u32");
  add_integers<uint64_t>(table, "u64");
  add_bits<uint16_t>(table, "b16");
  add_bits<uint32_t>(table, "b32");
  add_bits<uint64_t>(table, "b64");
  add_conversions<int8_t>(table, "s8");
  add_conversions<int16_t>(table, "s16");
  add_conversions<int32_t>(table, "s32");
  add_conversions<int64_t>(table, "s64");
  add_conversions<uint8_t>(table, "u8");
  add_conversions<uint16_t>(table, "u16");
  add_conversions<uint32_t>(table, "u32");
  add_conversions<uint64_t>(table, "u64");
  add_floats(table);
  table["mul.wide.u16"] =
      kBinary<[](uint16_t a, uint16_t b) { return uint32_t{a} * b; }, uint16_t, uint32_t>;
  table["mul.wide.u32"] =
      kBinary<[](uint32_t a, uint32_t b) { return uint64_t{a} * b; }, uint32_t, uint64_t>;
  table["brev.b32"] = kUnary<&bits_reversed, uint32_t>;
  table["or.pred"] = kBinary<std::logical_or<bool>{}, bool>;
  table["cvta.to.global.u64"] = table["mov.u64"];  // all memory has one address here
  table["redux.sync.max.u32"] = &largest_of_warp;
  table["shfl.sync.bfly.b32"] = &shuffle_across;
  return table;
}

}  // namespace

Operation find_operation(std::string_view name) {
  static const Table table = make_table();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace gemini::standin
