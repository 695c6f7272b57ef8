// SourceFiles: reads other programs' files in the background, never writes to them. Used for a
// checkpoint that serves as a tier.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/process_guard.h"

namespace gemini {

// A range of one file and its destination in memory; neither needs alignment.
struct SourcePart {
  int32_t file = 0;  // the index of its path
  int64_t offset = 0;
  void* destination = nullptr;
  int64_t nbytes = 0;
};

// Reads without filling the page cache: with O_DIRECT, through an aligned buffer for each thread;
// without O_DIRECT it drops the pages it has read. A file that was changed since it was opened is
// refused, because its weights would mix two versions.
//
// Thread-safe. Memory must stay valid until its ticket is done. In a forked child every call except
// the destructor throws StateError.
class SourceFiles {
 public:
  using Ticket = uint64_t;  // never 0
  // Called once, with the first error or nullptr, by the thread that ends a read. It holds no lock
  // of this class, and must not throw.
  using Done = std::function<void(const std::exception_ptr&)>;

  // Opens regular files, read-only. Throws IoError, StateError if `paths` is empty, and
  // ThreadError.
  explicit SourceFiles(std::vector<std::string> paths, int num_threads = 4);
  ~SourceFiles();  // drops parts that have not started, waits for the others
  SourceFiles(const SourceFiles&) = delete;
  SourceFiles& operator=(const SourceFiles&) = delete;

  // Starts to read. `done`, if set, is called instead of a `wait`, but not if there are no bytes.
  // Throws StateError for an unknown file, a negative range, or if closed.
  [[nodiscard]] Ticket read(const std::vector<SourcePart>& parts, Done done = nullptr);
  // Blocks until all parts are read, and throws the first error; call it once for each ticket.
  void wait(Ticket ticket);
  // Waits for started reads and closes the files. Idempotent.
  void close();

  [[nodiscard]] const std::vector<std::string>& paths() const noexcept { return paths_; }
  // Whether every file is read with O_DIRECT.
  [[nodiscard]] bool direct() const noexcept;

 private:
  struct File {
    int descriptor = -1;
    bool direct = false;
    struct stat opened = {};
  };
  struct Piece {
    Ticket ticket = 0;
    SourcePart part;
  };
  struct State;

  void open(const std::string& path);
  void stop() noexcept;
  void work();
  void read_piece(const SourcePart& part, char* buffer) const;
  void read_direct(const SourcePart& part, char* buffer) const;
  void read_buffered(const SourcePart& part) const;
  void require_unchanged(const SourcePart& part) const;

  ProcessGuard process_;
  std::vector<std::string> paths_;
  std::vector<File> files_;
  std::unique_ptr<State> state_;  // leaked in a forked child: its locks may be held there
                                  // indefinitely
};

}  // namespace gemini
