// Laws of the arena: never more than its capacity, never another content, memory really returned.
#include "transfer/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <random>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"
#include "transfer/window_space.h"

namespace gemini {
namespace {

constexpr int64_t kMib = 1 << 20;
constexpr char kPoisoned = static_cast<char>(0xFF);

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * ::sysconf(_SC_PAGESIZE);
}

int64_t resident_pages(const Window& window) {
  std::vector<unsigned char> pages(static_cast<size_t>(window.span_bytes() / kPageBytes));
  EXPECT_EQ(::mincore(window.address(), static_cast<size_t>(window.span_bytes()), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
}

void fill(const Window& window, int value) {
  std::memset(window.address(), value, static_cast<size_t>(window.span_bytes()));
}

bool holds_only(const Window& window, int value) {
  const char* const data = window.address();
  const auto rest = static_cast<size_t>(window.span_bytes() - 1);
  return data[0] == static_cast<char>(value) && std::memcmp(data, data + 1, rest) == 0;
}

bool refuse(char*, char*, int64_t, pages::Source) { return false; }

// Refuses two moves of three, in both directions.
bool refuse_often(char* from, char* to, int64_t nbytes, pages::Source source) {
  static int num_calls = 0;
  return ++num_calls % 3 == 0 && pages::move(from, to, nbytes, source);
}

class ArenaWithMover : public testing::TestWithParam<pages::Mover> {};
INSTANTIATE_TEST_SUITE_P(Movers, ArenaWithMover,
                         testing::Values(&pages::move, &refuse, &refuse_often));

// Any sequence of map, unmap, leave and settle: the limit holds, and every mapped window keeps its
// own bytes.
TEST_P(ArenaWithMover, RandomUseStaysWithinCapacityAndKeepsContents) {
  constexpr int64_t kCapacity = 24 * kMib;
  constexpr int64_t kLarge[] = {3 * kMib, 7 * kMib + 3 * kPageBytes, 2 * kMib, 9 * kMib};
  std::mt19937 random(3);
  WindowSpace space(80 * kMib);
  Arena arena(kCapacity, GetParam());
  std::vector<Window*> windows;
  for (int i = 0; i < 16; ++i)
    windows.push_back(space.create(i % 2 == 0 ? kLarge[i / 2 % 4] : 100000 * (i % 3 + 1)));
  int64_t mapped_bytes = 0;
  for (int step = 0; step < 500; ++step) {
    const size_t index = random() % windows.size();
    Window& window = *windows[index];
    if (window.mapped()) {
      ASSERT_TRUE(holds_only(window, static_cast<int>(index) + 1));
      if (random() % 2 == 0) {
        arena.leave(window);
      } else {
        arena.unmap(window, random() % 4 == 0 ? Spare::kReturned : Spare::kParked);
      }
      mapped_bytes -= window.span_bytes();
    } else if (random() % 4 == 0) {
      arena.settle();
    } else if (mapped_bytes + window.span_bytes() > kCapacity) {
      ASSERT_THROW(arena.map(window, Content::kAny), OutOfBudget);
    } else {
      const Content content = random() % 2 == 0 ? Content::kZeros : Content::kAny;
      arena.map(window, content);
      ASSERT_TRUE(content == Content::kAny || holds_only(window, 0));
      fill(window, static_cast<int>(index) + 1);
      mapped_bytes += window.span_bytes();
    }
    ASSERT_EQ(arena.mapped_bytes(), mapped_bytes);
    ASSERT_LE(arena.mapped_bytes() + arena.parked_bytes(), kCapacity);
    ASSERT_LE(arena.peak_bytes(), kCapacity);
  }
}

TEST(Arena, RefusalChangesNothing) {
  WindowSpace space(16 * kMib);
  Arena arena(4 * kMib);
  Window* held = space.create(2 * kMib);
  Window* parked = space.create(kMib);
  Window* large = space.create(3 * kMib);
  arena.map(*held, Content::kZeros);
  fill(*held, 9);
  arena.map(*parked, Content::kZeros);
  arena.unmap(*parked, Spare::kParked);
  EXPECT_THROW(arena.map(*large, Content::kZeros), OutOfBudget);
  EXPECT_EQ(arena.mapped_bytes(), 2 * kMib);
  EXPECT_EQ(arena.parked_bytes(), kMib);
  EXPECT_FALSE(large->mapped());
  EXPECT_TRUE(holds_only(*held, 9));
}

TEST(Arena, ParkedBlocksOfOtherSizesMakeRoom) {
  WindowSpace space(16 * kMib);
  Arena arena(4 * kMib);
  Window* small = space.create(kMib);
  Window* large = space.create(4 * kMib);
  arena.map(*small, Content::kZeros);
  arena.unmap(*small, Spare::kParked);
  arena.map(*large, Content::kZeros);
  EXPECT_EQ(arena.parked_bytes(), 0);
  EXPECT_EQ(arena.mapped_bytes(), 4 * kMib);
}

TEST(Arena, RecycledBlockBringsItsPagesWithIt) {
  WindowSpace space(64 * kMib);
  Arena arena(8 * kMib);
  Window* first = space.create(8 * kMib);
  Window* second = space.create(8 * kMib);
  arena.map(*first, Content::kAny);
  EXPECT_EQ(resident_pages(*first), 0);
  fill(*first, 1);
  arena.unmap(*first, Spare::kParked);
  EXPECT_EQ(resident_pages(*first), 0);
  arena.map(*second, Content::kAny);
  EXPECT_EQ(resident_pages(*second), 8 * kMib / kPageBytes);
  EXPECT_EQ(arena.peak_bytes(), 8 * kMib);
}

int num_moves = 0;

bool count_moves(char* from, char* to, int64_t nbytes, pages::Source source) {
  ++num_moves;
  return pages::move(from, to, nbytes, source);
}

TEST(Arena, PagesOfALeftWindowMoveOnceToTheNextOne) {
  WindowSpace space(64 * kMib);
  Arena arena(8 * kMib, count_moves);
  Window* first = space.create(8 * kMib);
  Window* second = space.create(8 * kMib);
  arena.map(*first, Content::kAny);
  fill(*first, 1);
  num_moves = 0;
  arena.leave(*first);
  EXPECT_FALSE(first->mapped());
  EXPECT_EQ(arena.parked_bytes(), 8 * kMib);
  arena.map(*second, Content::kAny);
  EXPECT_EQ(num_moves, 1);
  EXPECT_EQ(resident_pages(*second), 8 * kMib / kPageBytes);
  arena.settle();
  EXPECT_EQ(num_moves, 1);
  EXPECT_EQ(first->address()[0], kPoisoned);
  EXPECT_TRUE(holds_only(*second, 1));
  EXPECT_EQ(arena.peak_bytes(), 8 * kMib);
}

// Whatever nobody took is parked as it would have been at once.
TEST(Arena, SettlingParksWhatIsLeftAndGuardsTheWindow) {
  WindowSpace space(64 * kMib);
  Arena arena(16 * kMib);
  Window* first = space.create(5 * kMib + kPageBytes);
  Window* small = space.create(kMib);
  Window* third = space.create(4 * kMib);
  arena.map(*first, Content::kAny);
  fill(*first, 1);
  arena.leave(*first);
  arena.map(*small, Content::kZeros);
  arena.settle();
  EXPECT_EQ(first->address()[0], kPoisoned);
  EXPECT_EQ(first->address()[5 * kMib], kPoisoned);
  EXPECT_EQ(space.heal(), 1);
  EXPECT_TRUE(holds_only(*small, 0));
  arena.map(*third, Content::kAny);
  EXPECT_EQ(resident_pages(*third), 4 * kMib / kPageBytes);
  EXPECT_LE(arena.mapped_bytes() + arena.parked_bytes(), 5 * kMib + kPageBytes);
}

// A window that is mapped again before settle() gets pages that settle() does not take.
TEST(Arena, ALeftWindowMayBeMappedAgain) {
  WindowSpace space(16 * kMib);
  Arena arena(4 * kMib);
  Window* window = space.create(4 * kMib);
  arena.map(*window, Content::kAny);
  arena.leave(*window);
  EXPECT_THROW(arena.leave(*window), StateError);
  arena.map(*window, Content::kAny);
  fill(*window, 3);
  arena.settle();
  EXPECT_TRUE(holds_only(*window, 3));
  EXPECT_EQ(arena.mapped_bytes(), 4 * kMib);
  EXPECT_EQ(arena.parked_bytes(), 0);
}

// Memory that the limit takes from left windows is returned before settle().
TEST(Arena, LeftPagesMakeRoomForOthers) {
  WindowSpace space(64 * kMib);
  Arena arena(4 * kMib);
  Window* first = space.create(3 * kMib);
  Window* second = space.create(4 * kMib);
  arena.map(*first, Content::kAny);
  fill(*first, 1);
  arena.leave(*first);
  arena.map(*second, Content::kZeros);
  EXPECT_EQ(arena.mapped_bytes(), 4 * kMib);
  EXPECT_EQ(arena.parked_bytes(), 0);
  EXPECT_TRUE(holds_only(*second, 0));
  arena.settle();
  EXPECT_EQ(first->address()[2 * kMib], kPoisoned);
}

TEST(Arena, UnparkedMemoryReturnsToTheSystemAndParkedDoesNot) {
  constexpr int64_t kBytes = 64 * kMib;
  WindowSpace space(kBytes);
  Arena arena(kBytes);
  Window* window = space.create(kBytes);
  const int64_t before = resident_bytes();
  arena.map(*window, Content::kAny);
  fill(*window, 1);
  EXPECT_GT(resident_bytes() - before, kBytes * 9 / 10);
  arena.unmap(*window, Spare::kParked);
  EXPECT_GT(resident_bytes() - before, kBytes * 9 / 10);
  arena.trim(0);
  EXPECT_LT(resident_bytes() - before, kBytes / 10);
  arena.map(*window, Content::kAny);
  fill(*window, 1);
  arena.unmap(*window, Spare::kReturned);
  EXPECT_LT(resident_bytes() - before, kBytes / 10);
}

TEST(Arena, TrimReturnsWhatIsTooMuch) {
  WindowSpace space(16 * kMib);
  Arena arena(16 * kMib);
  std::vector<Window*> windows;
  for (int i = 0; i < 4; ++i) {
    windows.push_back(space.create((i + 1) * kPageBytes));
    arena.map(*windows.back(), Content::kZeros);
  }
  for (Window* window : windows) arena.unmap(*window, Spare::kParked);
  arena.trim(8 * kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), 8 * kPageBytes);
  arena.trim(-1);
  EXPECT_EQ(arena.parked_bytes(), 0);
}

TEST(Arena, IllegalTransitionsAreRefused) {
  WindowSpace space(4 * kMib);
  Arena arena(4 * kMib);
  Arena other(4 * kMib);
  Window* window = space.create(kMib);
  EXPECT_THROW(arena.unmap(*window, Spare::kParked), StateError);
  arena.map(*window, Content::kZeros);
  EXPECT_THROW(arena.map(*window, Content::kZeros), StateError);
  EXPECT_THROW(other.map(*window, Content::kZeros), StateError);
  EXPECT_THROW(other.unmap(*window, Spare::kParked), StateError);
  EXPECT_EQ(arena.mapped_bytes(), kMib);
  EXPECT_EQ(other.mapped_bytes() + other.parked_bytes(), 0);
  EXPECT_THROW(Arena(-1), StateError);
}

TEST(Arena, ProcessBytesIsTheSumWhicheverIsDestroyedFirst) {
  const int64_t before = Arena::process_bytes();
  auto space = std::make_unique<WindowSpace>(8 * kMib);
  auto first = std::make_unique<Arena>(4 * kMib);
  auto second = std::make_unique<Arena>(4 * kMib);
  Window* mapped = space->create(kMib);
  Window* orphan = space->create(kMib);
  Window* parked = space->create(kMib);
  first->map(*mapped, Content::kZeros);
  second->map(*orphan, Content::kZeros);
  second->map(*parked, Content::kZeros);
  second->unmap(*parked, Spare::kParked);
  EXPECT_EQ(Arena::process_bytes() - before, 3 * kMib);
  second.reset();  // the orphan keeps its memory: there may be views of it
  EXPECT_EQ(Arena::process_bytes() - before, 2 * kMib);
  orphan->address()[0] = 1;
  space.reset();
  EXPECT_EQ(Arena::process_bytes(), before);
  EXPECT_EQ(first->mapped_bytes(), 0);
}

TEST(Arena, ManySmallWindowsStayWithinTheMapLimit) {
  constexpr int kNumWindows = 5000;
  WindowSpace space(kNumWindows * 2 * kPageBytes);
  Arena arena(kNumWindows * 2 * kPageBytes);
  std::vector<Window*> windows;
  for (int i = 0; i < kNumWindows; ++i) {
    windows.push_back(space.create(2 * kPageBytes));
    ASSERT_NO_THROW(arena.map(*windows.back(), Content::kZeros));
    windows.back()->address()[0] = 1;
  }
  for (Window* window : windows) ASSERT_NO_THROW(arena.unmap(*window, Spare::kParked));
  for (Window* window : windows) ASSERT_NO_THROW(arena.map(*window, Content::kZeros));
  EXPECT_EQ(arena.mapped_bytes(), kNumWindows * 2 * kPageBytes);
}

TEST(Arena, WindowsOfOtherSizesGetThePagesInPieces) {
  WindowSpace space(64 * kMib);
  Arena arena(16 * kMib);
  Window* large = space.create(8 * kMib);
  Window* odd = space.create(5 * kMib);
  Window* half = space.create(4 * kMib);
  arena.map(*large, Content::kAny);
  fill(*large, 1);
  arena.unmap(*large, Spare::kParked);
  arena.map(*odd, Content::kAny);  // whole huge pages of the block, and half of one for the tail
  EXPECT_EQ(resident_pages(*odd), 5 * kMib / kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), 3 * kMib);
  arena.map(*half, Content::kAny);  // a huge page; there are too few small ones for the other
  EXPECT_EQ(resident_pages(*half), 2 * kMib / kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), kMib);
  fill(*odd, 2);
  fill(*half, 3);
  EXPECT_TRUE(holds_only(*odd, 2));
  arena.unmap(*odd, Spare::kParked);
  arena.unmap(*half, Spare::kParked);
  arena.map(*large, Content::kZeros);  // the huge pages of both
  EXPECT_EQ(resident_pages(*large), 8 * kMib / kPageBytes);
  EXPECT_TRUE(holds_only(*large, 0));
  EXPECT_EQ(arena.mapped_bytes(), 8 * kMib);
  EXPECT_EQ(arena.parked_bytes(), 2 * kMib);
  Window* page = space.create(2 * kMib);
  arena.map(*page, Content::kAny);  // both tails serve where no huge page is left
  EXPECT_EQ(resident_pages(*page), 2 * kMib / kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), 0);
}

// Windows of 3 MiB and of a little less than 1 MiB take turns: none of them needs a fresh page.
TEST(Arena, TailsGoFromWindowToWindow) {
  WindowSpace space(64 * kMib);
  Arena arena(16 * kMib);
  const int64_t small_bytes = kMib - 3 * kPageBytes;
  Window* large = space.create(3 * kMib);
  Window* small = space.create(small_bytes);
  Window* other = space.create(2 * kMib + small_bytes);
  arena.map(*large, Content::kAny);
  fill(*large, 1);
  arena.unmap(*large, Spare::kParked);
  arena.map(*small, Content::kAny);  // from behind the huge page; what is left of the tail is small
  EXPECT_EQ(resident_pages(*small), small_bytes / kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), 2 * kMib);
  fill(*small, 2);
  arena.unmap(*small, Spare::kParked);
  arena.map(*other, Content::kAny);  // the huge page of one block, the tail of another
  EXPECT_EQ(resident_pages(*other), (2 * kMib + small_bytes) / kPageBytes);
  EXPECT_EQ(arena.parked_bytes(), 0);
  fill(*other, 3);
  EXPECT_TRUE(holds_only(*other, 3));
  EXPECT_EQ(arena.mapped_bytes(), other->span_bytes());
}

// Windows with tails and without go through a few MiB, layer by layer, as weights that are read for
// each pass: they pass the same memory on, and next to none is zeroed again.
TEST(Arena, StreamedWindowsPassTheirMemoryOn) {
  constexpr int64_t kLimit = 9 * kMib;
  constexpr int64_t kSizes[] = {3 * kMib + 3 * kPageBytes, kMib + 2 * kPageBytes, 4 * kMib,
                                4 * kMib};
  WindowSpace space(256 * kMib);
  Arena arena(16 * kMib);
  std::vector<Window*> windows;
  for (int i = 0; i < 32; ++i) windows.push_back(space.create(kSizes[i % 4]));
  std::deque<Window*> mapped;
  int64_t fresh_pages = 0;
  int64_t num_pages = 0;
  for (int i = 0; i < 4 * 32; ++i) {
    Window* const window = windows[static_cast<size_t>(i % 32)];
    while (arena.mapped_bytes() + window->span_bytes() > kLimit) {
      arena.unmap(*mapped.front(), Spare::kParked);
      mapped.pop_front();
    }
    arena.map(*window, Content::kAny);
    arena.trim(kLimit - arena.mapped_bytes());
    if (i >= 32) {
      num_pages += window->span_bytes() / kPageBytes;
      fresh_pages += window->span_bytes() / kPageBytes - resident_pages(*window);
    }
    fill(*window, 1);
    mapped.push_back(window);
  }
  EXPECT_LT(fresh_pages, num_pages / 100);
  EXPECT_LE(arena.mapped_bytes() + arena.parked_bytes(), kLimit);
}

// Where the kernel refuses a move midway, the other pieces and fresh pages are as good.
TEST(Arena, RefusedPieceIsFresh) {
  static int num_moves;
  num_moves = 0;
  const auto refuse_fourth = [](char* from, char* to, int64_t nbytes, pages::Source source) {
    return ++num_moves != 4 && pages::move(from, to, nbytes, source);
  };
  WindowSpace space(64 * kMib);
  Arena arena(12 * kMib, refuse_fourth);
  std::vector<Window*> parts;
  for (int i = 0; i < 2; ++i) {
    parts.push_back(space.create(4 * kMib));
    arena.map(*parts.back(), Content::kAny);
    fill(*parts.back(), 1);
  }
  for (Window* part : parts) arena.unmap(*part, Spare::kParked);
  Window* whole = space.create(8 * kMib);
  arena.map(*whole, Content::kZeros);
  EXPECT_EQ(num_moves, 4);
  EXPECT_EQ(resident_pages(*whole), 4 * kMib / kPageBytes);
  EXPECT_TRUE(holds_only(*whole, 0));
  EXPECT_EQ(arena.mapped_bytes(), 8 * kMib);
  EXPECT_EQ(arena.parked_bytes(), 0);
  arena.unmap(*whole, Spare::kParked);
  EXPECT_EQ(arena.parked_bytes(), 8 * kMib);
}

}  // namespace
}  // namespace gemini
