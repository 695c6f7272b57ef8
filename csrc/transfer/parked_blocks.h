// Memory that no window has now, kept with its pages for the windows to come.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/arena_ledger.h"

namespace gemini {

enum class Pages : bool { kSmall, kHuge };  // huge: of 2 MiB, and whole

// A part of a window that one call of the kernel moves.
struct Piece {
  char* address;  // where its pages are; nullptr: they are to be fresh
  int64_t nbytes;
  Pages pages;
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

  // Makes room for the pieces of one more window, so that add() cannot fail.
  void reserve(size_t num_pieces);
  // Takes over the pieces of a window, which lie one behind the other from `address` on, huge ones
  // at multiples of 2 MiB. Pieces that nobody would take go back to the system.
  void add(char* address, const std::vector<Piece>& pieces) noexcept;

  // Returns the pieces of a window of `span_bytes`, in the order in which they are to lie there.
  // Those that nothing parked serves are fresh.
  //
  // Huge pages serve what is huge in the window, small ones its tail. Where huge pages are short
  // and there are enough small ones, these serve instead, and where small ones are short, a huge
  // page is split: to give some back to the system and have others zeroed would cost far more.
  [[nodiscard]] std::vector<Piece> take(int64_t span_bytes);

  // Returns at least `nbytes` to the system, or all there is, oldest first: whole huge pages, and
  // small ones for the rest.
  void drop(int64_t nbytes);
  // Returns everything.
  void drop_all() noexcept;

 private:
  // A range that one call of the kernel moves.
  struct Block {
    char* address;
    int64_t nbytes;
  };
  using Blocks = std::vector<Block>;  // oldest first

  int64_t take_from(Blocks& blocks, Pages pages, int64_t missing_bytes, std::vector<Piece>& taken);
  void split_huge_page();
  void drop_front(Blocks& blocks, int64_t nbytes);

  ArenaLedger& ledger_;
  Blocks huge_;   // of whole huge pages
  Blocks small_;  // of any others
};

}  // namespace gemini
