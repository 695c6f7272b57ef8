#include "aio/async_file.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "aio/block_checksums.h"
#include "aio/striped_file.h"
#include "common/bytes.h"
#include "common/error.h"

namespace gemini {
namespace {

constexpr int64_t kMaxRequestBytes = 1 << 30;  // one call of the kernel moves less than 2 GiB
constexpr int kMaxDepth = 1024;
constexpr size_t kMaxAreas = 512;  // of one request; the kernel allows 1024

AsyncFileOptions checked(AsyncFileOptions options) {
  if (options.depth < 1 || options.depth > kMaxDepth) {
    throw StateError("depth must be in 1 to " + std::to_string(kMaxDepth) + ", got " +
                     std::to_string(options.depth));
  }
  const int64_t request = options.request_bytes;
  if (request < kPageBytes || request > kMaxRequestBytes || request % kPageBytes != 0) {
    throw StateError("request_bytes must be a multiple of " + std::to_string(kPageBytes) +
                     " and at most 1 GiB, got " + std::to_string(request));
  }
  return options;
}

StripedFile::Options striping(const AsyncFileOptions& options) {
  return {options.direct, options.reserve, options.request_bytes};
}

int64_t total_bytes(const std::vector<iovec>& areas) {
  int64_t total = 0;
  for (const iovec& area : areas) total += static_cast<int64_t>(area.iov_len);
  return total;
}

int processors() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

bool is_whole(int64_t value) { return value % kPageBytes == 0; }

}  // namespace

struct AsyncFile::Parts {
  Parts(const std::vector<std::string>& dirs, int64_t nbytes, const AsyncFileOptions& options,
        std::shared_ptr<IoHook> hook)
      : file(dirs, nbytes, striping(options), hook.get()),
        queue(file.path(), file.direct(), std::move(hook), steps()) {
    if (options.checksums) checksums.emplace(file.size());
  }

  RequestQueue::Steps steps() {
    return {[this](const IoPiece& piece) {
              if (checksums && piece.is_write()) checksums->remember(piece);
            },
            [this](const IoPiece& piece) { return complete(piece); }};
  }

  std::exception_ptr complete(const IoPiece& piece) {
    if (const int code = forget_cached(piece); code != 0) {
      return std::make_exception_ptr(
          IoError(code, file.path(), piece.position, "cannot write back"));
    }
    if (!checksums || piece.is_write()) return nullptr;
    const int64_t damaged = checksums->find_damage(piece);
    if (damaged < 0) return nullptr;
    return std::make_exception_ptr(ChecksumError(
        EIO, file.path(), damaged, "4096 bytes read are not those that were written to"));
  }

  int forget_cached(const IoPiece& piece) {
    const StripedFile::Stretch part = file.locate(piece.position, piece.nbytes);
    UnlinkedFile& home = file.file(part.file);
    return home.direct() ? 0 : home.forget_cached(part.offset, part.nbytes, piece.is_write());
  }

  StripedFile file;
  std::optional<BlockChecksums> checksums;
  RequestQueue queue;
  std::unique_ptr<IoBackend> backend;  // after the queue: its threads must end first
};

AsyncFile::AsyncFile(const std::vector<std::string>& dirs, int64_t nbytes, AsyncFileOptions options,
                     std::shared_ptr<IoHook> hook)
    : options_(checked(options)),
      parts_(std::make_unique<Parts>(dirs, nbytes, options_, std::move(hook))),
      depth_(options_.depth),
      direct_(parts_->file.direct()),
      can_discard_(parts_->file.can_discard()),
      size_(parts_->file.size()),
      path_(parts_->file.path()) {
  const bool in_memory = parts_->file.in_memory();
  if (in_memory) depth_ = std::min(depth_, processors());
  parts_->backend =
      start_backend(options_.backend, parts_->queue, parts_->file.descriptors(), depth_, in_memory);
  backend_kind_ = parts_->backend->kind();
}

AsyncFile::~AsyncFile() {
  if (!process_.is_owner()) {
    (void)parts_.release();
    return;
  }
  parts_->queue.drop();
  parts_->queue.stop();
  parts_->backend->join();
}

void AsyncFile::close() {
  process_.require("this AsyncFile");
  if (!parts_->queue.close()) return;
  parts_->queue.stop();
  parts_->backend->join();
  parts_->file.close();
}

void AsyncFile::discard(int64_t offset, int64_t nbytes) {
  process_.require("this AsyncFile");
  check_range(nbytes, offset);
  parts_->file.discard(offset, nbytes);
  if (parts_->checksums) parts_->checksums->forget(offset, nbytes);
}

void AsyncFile::grow(int64_t nbytes) {
  process_.require("this AsyncFile");
  if (options_.checksums) throw StateError(path_ + " has checksums, and stays as long as it is");
  parts_->file.grow(nbytes);
  can_discard_ = parts_->file.can_discard();
  size_ = parts_->file.size();
}

AsyncFile::Ticket AsyncFile::read(void* buffer, int64_t nbytes, int64_t offset,
                                  RequestQueue::Done done) {
  process_.require("this AsyncFile");
  check_range(nbytes, offset);
  return submit(IoKind::kRead, {{buffer, static_cast<size_t>(nbytes)}}, offset, std::move(done));
}

AsyncFile::Ticket AsyncFile::write(const void* buffer, int64_t nbytes, int64_t offset,
                                   RequestQueue::Done done) {
  process_.require("this AsyncFile");
  check_range(nbytes, offset);
  // One type serves both directions; a piece that writes only reads its buffer.
  return submit(IoKind::kWrite, {{const_cast<void*>(buffer), static_cast<size_t>(nbytes)}}, offset,
                std::move(done));
}

AsyncFile::Ticket AsyncFile::readv(const std::vector<iovec>& areas, int64_t offset) {
  process_.require("this AsyncFile");
  check_range(total_bytes(areas), offset);
  return submit(IoKind::kRead, areas, offset);
}

AsyncFile::Ticket AsyncFile::writev(const std::vector<iovec>& areas, int64_t offset) {
  process_.require("this AsyncFile");
  check_range(total_bytes(areas), offset);
  return submit(IoKind::kWrite, areas, offset);
}

void AsyncFile::check_range(int64_t nbytes, int64_t offset) const {
  const int64_t size = size_;
  if (nbytes >= 0 && offset >= 0 && offset <= size && nbytes <= size - offset) return;
  throw StateError(std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                   " are outside " + path_ + " of " + std::to_string(size) + " bytes");
}

void AsyncFile::check_alignment(const std::vector<iovec>& areas, int64_t offset) const {
  if (!direct_ && !options_.checksums) return;
  for (const iovec& area : areas) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(area.iov_base));
    const auto nbytes = static_cast<int64_t>(area.iov_len);
    if (is_whole(offset) && is_whole(nbytes) && (!direct_ || is_whole(address))) continue;
    throw StateError((direct_ ? "O_DIRECT on " : "checksums of ") + path_ + " need multiples of " +
                     std::to_string(kPageBytes) + ", got address % 4096 = " +
                     std::to_string(address % kPageBytes) + ", nbytes = " + std::to_string(nbytes) +
                     ", offset = " + std::to_string(offset) +
                     "; align them or use direct=False, checksums=False");
  }
}

AsyncFile::Ticket AsyncFile::submit(IoKind kind, const std::vector<iovec>& areas, int64_t offset,
                                    RequestQueue::Done done) {
  check_alignment(areas, offset);
  const Ticket ticket = parts_->queue.push(cut(kind, areas, offset), std::move(done));
  parts_->backend->wake();
  return ticket;
}

std::vector<IoPiece> AsyncFile::cut(IoKind kind, const std::vector<iovec>& areas,
                                    int64_t position) const {
  const int64_t end = position + total_bytes(areas);
  std::vector<IoPiece> pieces;
  auto area = areas.begin();
  size_t used = 0;  // bytes of *area that are in pieces already
  while (position < end) {
    const StripedFile::Stretch stretch = parts_->file.locate(position, end - position);
    IoPiece& piece = pieces.emplace_back();
    piece.kind = kind;
    piece.file = stretch.file;
    piece.offset = stretch.offset;
    piece.position = position;
    while (piece.nbytes < stretch.nbytes && piece.areas.size() < kMaxAreas) {
      const auto left = static_cast<size_t>(stretch.nbytes - piece.nbytes);
      const size_t nbytes = std::min(area->iov_len - used, left);
      if (nbytes > 0) piece.areas.push_back({static_cast<char*>(area->iov_base) + used, nbytes});
      piece.nbytes += static_cast<int64_t>(nbytes);
      used += nbytes;
      if (used == area->iov_len) ++area, used = 0;
    }
    position += piece.nbytes;
  }
  return pieces;
}

bool AsyncFile::pin(void* address, int64_t nbytes) {
  process_.require("this AsyncFile");
  return nbytes > 0 && parts_->backend->pin(address, nbytes);
}

void AsyncFile::forget(void* address) {
  process_.require("this AsyncFile");
  parts_->backend->forget(address);
}

bool AsyncFile::done(Ticket ticket) const {
  process_.require("this AsyncFile");
  return parts_->queue.done(ticket);
}

void AsyncFile::wait(Ticket ticket) {
  process_.require("this AsyncFile");
  parts_->queue.wait(ticket);
}

void AsyncFile::wait_all() {
  process_.require("this AsyncFile");
  parts_->queue.wait_all();
}

AsyncFileStats AsyncFile::stats() const {
  process_.require("this AsyncFile");
  return {parts_->queue.stats(), parts_->backend->stats()};
}

}  // namespace gemini
