// The vocabulary of the chunk table: tiers, tensor states, actions. Plain data, no behaviour.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gemini {

using ChunkId = int32_t;
using TensorId = int32_t;
using ActionId = uint64_t;

enum class Tier : uint8_t { kDevice, kHost, kDisk };
inline constexpr std::array kTiers{Tier::kDevice, Tier::kHost, Tier::kDisk};
inline constexpr size_t kNumTiers = kTiers.size();

[[nodiscard]] constexpr size_t index(Tier tier) { return static_cast<size_t>(tier); }

enum class TensorState : uint8_t { kFree, kHold, kCompute };

enum class ActionKind : uint8_t {
  kAllocate,  // a chunk without content gets bytes on DEVICE; on HOST, zeroed bytes to be used
              // there
  kFetch,     // HOST -> DEVICE
  kLoad,      // DISK -> DEVICE
  kEvict,     // DEVICE -> HOST
  kSpill,     // DEVICE or HOST -> DISK
  kDrop,      // the copy on `from`, or its DISK extent, is released without a copy
};

// One action for the executor, in list order. ALLOCATE and DROP are accounted when decided and have
// id 0; the others are transfers, to be reported by complete(id) or abort(id).
struct Action {
  ActionId id = 0;
  ActionKind kind = ActionKind::kDrop;
  ChunkId chunk = 0;
  Tier from = Tier::kDevice;  // ALLOCATE: same as `to`
  Tier to = Tier::kDevice;    // DROP: same as `from`
  int64_t nbytes = 0;
  bool had_content = false;  // of a DROP: the copy was valid, not just a DISK extent

  friend bool operator==(const Action&, const Action&) = default;
};

using Actions = std::vector<Action>;

// What the executor releases after a transfer has ended.
struct Completion {
  bool source_freed = false;       // unmap or release the bytes on `from`
  bool destination_freed = false;  // the same on `to`: the bytes written there are void
  bool doomed = false;             // the chunk was freed meanwhile: both of the above are set

  friend bool operator==(const Completion&, const Completion&) = default;
};

// A set of tiers in one byte.
class TierSet {
 public:
  constexpr TierSet() = default;
  [[nodiscard]] constexpr bool has(Tier tier) const { return (bits_ & bit(tier)) != 0; }
  [[nodiscard]] constexpr bool empty() const { return bits_ == 0; }
  [[nodiscard]] constexpr bool is_only(Tier tier) const { return bits_ == bit(tier); }
  constexpr void insert(Tier tier) { bits_ = static_cast<uint8_t>(bits_ | bit(tier)); }
  constexpr void erase(Tier tier) { bits_ = static_cast<uint8_t>(bits_ & ~bit(tier)); }
  constexpr void clear() { bits_ = 0; }

 private:
  static constexpr uint8_t bit(Tier tier) {
    return static_cast<uint8_t>(1U << static_cast<unsigned>(tier));
  }
  uint8_t bits_ = 0;
};

[[nodiscard]] constexpr const char* name(Tier tier) {
  constexpr std::array kNames{"DEVICE", "HOST", "DISK"};
  return kNames[static_cast<size_t>(tier)];
}

// The user's option for the tier's budget.
[[nodiscard]] constexpr const char* budget_option(Tier tier) {
  constexpr std::array kOptions{"device_bytes", "host_bytes", "disk_bytes"};
  return kOptions[static_cast<size_t>(tier)];
}

[[nodiscard]] constexpr const char* name(TensorState state) {
  constexpr std::array kNames{"FREE", "HOLD", "COMPUTE"};
  return kNames[static_cast<size_t>(state)];
}

[[nodiscard]] constexpr const char* name(ActionKind kind) {
  constexpr std::array kNames{"ALLOCATE", "FETCH", "LOAD", "EVICT", "SPILL", "DROP"};
  return kNames[static_cast<size_t>(kind)];
}

// The legal transitions of a tensor. COMPUTE -> COMPUTE is a nested access, FREE -> FREE a free()
// of a free tensor. A tensor is never freed while an operator uses it.
[[nodiscard]] constexpr bool is_legal(TensorState from, TensorState to) {
  switch (to) {
    case TensorState::kCompute:
      return true;
    case TensorState::kHold:
      return from == TensorState::kCompute;
    case TensorState::kFree:
      return from != TensorState::kCompute;
  }
  return false;
}

}  // namespace gemini
