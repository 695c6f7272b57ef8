// ParkedBlocks: memory of no current window, kept with its pages for future windows.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/arena_ledger.h"
#include "transfer/pages.h"

namespace gemini {

enum class Pages : bool { kSmall, kHuge };  // huge: whole pages of 2 MiB
// kWindow: still in the window that gave them up, whose addresses must stay reserved.
enum class Home : bool { kSlot, kWindow };

// A part of a window that one system call moves.
struct Piece {
  char* address;  // where its pages are; nullptr: fresh pages
  int64_t nbytes;
  Pages pages;
  Home home = Home::kSlot;
};

// The parked blocks of an arena, which serializes the calls. The ledger counts them: added blocks
// must be counted as parked already, taken ones stay counted; dropped ones are subtracted here.
class ParkedBlocks {
 public:
  explicit ParkedBlocks(ArenaLedger& ledger) : ledger_(ledger) {}
  // Does not release the memory: a forked child does not have it.
  ~ParkedBlocks() = default;
  ParkedBlocks(const ParkedBlocks&) = delete;
  ParkedBlocks& operator=(const ParkedBlocks&) = delete;

  // Makes room for the pieces of one more window, so that add() cannot fail.
  void reserve(size_t num_pieces);
  // Takes over the pieces of a window, which are contiguous from `address` on, huge ones at
  // multiples of 2 MiB. Pieces that take() would not use are returned to the system; those of
  // kWindow are only forgotten, until the window's owner reserves its addresses.
  void add(char* address, const std::vector<Piece>& pieces, Home home) noexcept;
  // Moves the pages of kWindow blocks to slots of their own. Returns them to the system if `mover`
  // or the system refuses.
  void move_to_slots(pages::Mover mover) noexcept;

  // Returns the pieces for a window of `span_bytes`, in their order in the window. Missing pieces
  // are fresh.
  //
  // Huge pages are used for the huge part of the window, small ones for its tail. If there are too
  // few huge pages but enough small ones, small ones are used instead. If there are too few small
  // ones, a huge page is split: returning some to the system and zeroing others would cost far
  // more.
  [[nodiscard]] std::vector<Piece> take(int64_t span_bytes);

  // Returns at least `nbytes`, or all there is, to the system, oldest first: whole huge pages, and
  // small ones for the rest.
  void drop(int64_t nbytes);
  // Returns everything.
  void drop_all() noexcept;

 private:
  // A range that one system call moves.
  struct Block {
    char* address;
    int64_t nbytes;
    Home home;
  };
  using Blocks = std::vector<Block>;  // oldest first

  int64_t take_from(Blocks& blocks, Pages pages, int64_t missing_bytes, std::vector<Piece>& taken);
  void split_huge_page();
  [[nodiscard]] bool move_to_slot(Block& block, Pages pages, pages::Mover mover) const noexcept;
  void drop_front(Blocks& blocks, int64_t nbytes);

  ArenaLedger& ledger_;
  Blocks huge_;   // of whole huge pages
  Blocks small_;  // of any others
};

}  // namespace gemini
