// The host tier: blocks in the backend's host memory, pinned where there is a device, moved by one
// worker thread in the order in which transfers were started, so that a Remove never overtakes the
// write before it. The engine thread prepares a copy, behind what the device has yet to do; the
// worker starts it, waits for it and looks at what came.
#include <deque>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "engine/kv_tier.h"

namespace carryover {
namespace {

class HostTier : public KvTier {
 public:
  HostTier(size_t budget_bytes, const Ops& ops, Backend* backend)
      : budget_bytes_(budget_bytes), ops_(ops), backend_(backend), worker_([this] { Work(); }) {}

  ~HostTier() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      queue_changed_.Signal();
    }
    worker_.join();
    for (Job& job : queue_) {
      if (job.kind != Job::kRemove) ops_.finish_copy(backend_, job.copy).IgnoreError();
    }
    for (auto& [id, image] : images_) Free(&image);
    for (const auto& [bytes, payload] : spare_) ops_.release_host(backend_, payload);
  }

  Tier tier() const override { return Tier::kHost; }

  absl::Status StartWrite(ImageId image, const KvImageHeader& header, const void* device,
                          Done done) override {
    const size_t bytes = ImageBytes(header);
    if (bytes > budget_bytes_ - used_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "host tier: an image of ", bytes, " bytes is over its budget of ", budget_bytes_));
    }
    used_bytes_ += bytes;
    sizes_[image] = bytes;
    Enqueue({.kind = Job::kWrite,
             .image = image,
             .header = EncodeKvImageHeader(header),
             .copy = ops_.prepare_copy(backend_),
             .source = device,
             .bytes = header.payload_bytes,
             .done = std::move(done)});
    return absl::OkStatus();
  }

  void StartRead(ImageId image, const KvImageHeader& expected, void* device, Done done) override {
    Enqueue({.kind = Job::kRead,
             .image = image,
             .header = EncodeKvImageHeader(expected),
             .copy = ops_.prepare_copy(backend_),
             .destination = device,
             .bytes = expected.payload_bytes,
             .done = std::move(done)});
  }

  void Remove(ImageId image) override {
    GiveBack(image);
    Enqueue({.kind = Job::kRemove, .image = image});
  }

  size_t used_bytes() const override { return used_bytes_; }
  size_t budget_bytes() const override { return budget_bytes_; }
  size_t ImageBytes(const KvImageHeader& header) const override {
    // The encoded header without encoding it: fixed fields, then what varies.
    return header.payload_bytes + sizeof(Image) + 256 + 32 * header.provenance.sources.size() +
           header.provenance.map.size() + 4 * header.tokens.size();
  }

  int Poll() override {
    std::deque<Job> finished;
    {
      MutexLock lock(&mutex_);
      finished.swap(finished_);
    }
    for (Job& job : finished) {
      if (job.kind == Job::kWrite && !job.result.ok()) GiveBack(job.image);
      if (job.done) job.done(std::move(job.result));
    }
    return static_cast<int>(finished.size());
  }

  void SetWakeup(std::function<void()> wakeup) override {
    MutexLock lock(&mutex_);
    wakeup_ = std::move(wakeup);
  }

 private:
  struct Image {
    std::string header;
    void* payload = nullptr;
    size_t bytes = 0;
    Digest checksum{};
  };

  struct Job {
    enum Kind { kWrite, kRead, kRemove } kind = kRemove;
    ImageId image = 0;
    std::string header;
    Copy* copy = nullptr;
    const void* source = nullptr;
    void* destination = nullptr;
    size_t bytes = 0;
    Done done;
    absl::Status result;
  };

  void Enqueue(Job job) {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(job));
    queue_changed_.Signal();
  }

  void GiveBack(ImageId image) {
    const auto it = sizes_.find(image);
    if (it == sizes_.end()) return;
    used_bytes_ -= it->second;
    sizes_.erase(it);
  }

  // The worker.
  void Work() {
    for (;;) {
      Job job;
      {
        MutexLock lock(&mutex_);
        while (queue_.empty() && !stopping_) queue_changed_.Wait(&mutex_);
        if (stopping_) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      if (job.kind == Job::kRemove) {
        Drop(job.image);
        continue;
      }
      job.result = job.kind == Job::kWrite ? Write(&job) : Read(&job);
      std::function<void()> wakeup;
      {
        MutexLock lock(&mutex_);
        finished_.push_back(std::move(job));
        wakeup = wakeup_;
      }
      if (wakeup) wakeup();
    }
  }

  absl::Status Write(Job* job) {
    Drop(job->image);
    Image image;
    image.header = std::move(job->header);
    image.bytes = job->bytes;
    absl::StatusOr<void*> payload = Payload(job->bytes);
    if (payload.ok()) {
      image.payload = *payload;
      ops_.start_copy(backend_, job->copy, image.payload, job->source, image.bytes,
                      CopyWay::kToHost);
    }
    absl::Status status = payload.status();
    status.Update(ops_.finish_copy(backend_, job->copy));
    if (!status.ok()) {
      Free(&image);
      return absl::Status(status.code(), absl::StrCat("host tier: ", status.message()));
    }
    image.checksum = KvImageChecksum(image.header, image.payload, image.bytes);
    images_[job->image] = std::move(image);
    return absl::OkStatus();
  }

  absl::Status Read(Job* job) {
    const absl::StatusOr<const Image*> image = Checked(*job);
    if (image.ok()) {
      ops_.start_copy(backend_, job->copy, job->destination, (*image)->payload, (*image)->bytes,
                      CopyWay::kToDevice);
    }
    absl::Status status = image.status();
    status.Update(ops_.finish_copy(backend_, job->copy));
    return status;
  }

  // The image that a job reads, if it is what the job expects.
  absl::StatusOr<const Image*> Checked(const Job& job) {
    const auto it = images_.find(job.image);
    if (it == images_.end()) return absl::NotFoundError("host tier: no such image");
    const Image& image = it->second;
    if (image.header != job.header || image.bytes != job.bytes) {
      return absl::DataLossError("host tier: the image is of another block");
    }
    if (KvImageChecksum(image.header, image.payload, image.bytes) != image.checksum) {
      return absl::DataLossError("host tier: checksum differs");
    }
    return &image;
  }

  absl::StatusOr<void*> Payload(size_t bytes) {
    const auto spare = spare_.find(bytes);
    if (spare == spare_.end()) return ops_.alloc_host(backend_, bytes);
    void* const payload = spare->second;
    spare_.erase(spare);
    return payload;
  }

  void Drop(ImageId id) {
    const auto it = images_.find(id);
    if (it == images_.end()) return;
    Free(&it->second);
    images_.erase(it);
  }

  void Free(Image* image) {
    if (image->payload != nullptr) spare_.emplace(image->bytes, image->payload);
    image->payload = nullptr;
  }

  const size_t budget_bytes_;
  const Ops& ops_;
  Backend* const backend_;

  // Of the engine thread.
  size_t used_bytes_ = 0;
  std::unordered_map<ImageId, size_t> sizes_;

  // Of the worker; of the destructor once that has ended.
  std::unordered_map<ImageId, Image> images_;
  // Payloads of images that are gone, by size, for the next: a device stands still while pinned
  // memory is made or freed. Images and these together were images once, within the budget.
  std::unordered_multimap<size_t, void*> spare_;

  Mutex mutex_;
  CondVar queue_changed_;
  std::deque<Job> queue_ GUARDED_BY(mutex_);
  std::deque<Job> finished_ GUARDED_BY(mutex_);
  std::function<void()> wakeup_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;

  std::thread worker_;  // last: starts when all else is there
};

}  // namespace

std::unique_ptr<KvTier> NewHostTier(size_t budget_bytes, const Ops& ops, Backend* backend) {
  return std::make_unique<HostTier>(budget_bytes, ops, backend);
}

}  // namespace carryover
