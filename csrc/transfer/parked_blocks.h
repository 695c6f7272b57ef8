// Memory that no window has now, kept with its pages for the windows to come.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/arena_ledger.h"

namespace gemini {

// A range of pages that one call of the kernel moves.
struct Piece {
  char* address;
  int64_t nbytes;
};

// The parked blocks of an arena, which serializes the calls. Its ledger counts them: what is added
// here is parked there already, what is taken is still; what is dropped here leaves it.
class ParkedBlocks {
 public:
  explicit ParkedBlocks(ArenaLedger& ledger) : ledger_(ledger) {}
  // Leaves the memory alone, which a forked child does not have.
  ~ParkedBlocks() = default;
  ParkedBlocks(const ParkedBlocks&) = delete;
  ParkedBlocks& operator=(const ParkedBlocks&) = delete;

  // Makes room for one more block, so that add() cannot fail.
  void reserve() { blocks_.reserve(blocks_.size() + 1); }
  // Takes over a range, which starts at a multiple of 2 MiB if it is that large, and consists of
  // pieces of these sizes.
  void add(char* address, std::vector<int64_t> sizes) noexcept;

  // Hands over memory for a window of `span_bytes`, at most that much, in the order in which it is
  // to lie there: the block of that size that was parked last; or else whole huge pages of blocks
  // of other sizes, and if these fill all huge pages of the window, its tail of what lies behind
  // those of a block.
  [[nodiscard]] std::vector<Piece> take(int64_t span_bytes);

  // Returns the block that was parked first to the system; there must be one.
  void drop_oldest();
  // Returns everything.
  void drop_all() noexcept;

 private:
  struct Block {
    char* address;
    std::vector<int64_t> sizes;  // of its pieces
    [[nodiscard]] int64_t nbytes() const noexcept;
  };

  bool take_huge_pages(int64_t missing_bytes, std::vector<Piece>& taken);
  void take_tail(int64_t nbytes, std::vector<Piece>& taken);
  void cut_front(Block& block, int64_t nbytes, std::vector<Piece>& taken);
  void cut_back(Block& block, int64_t nbytes, std::vector<Piece>& taken);
  void drop_if_small(size_t index) noexcept;

  ArenaLedger& ledger_;
  std::vector<Block> blocks_;  // oldest first
};

}  // namespace gemini
