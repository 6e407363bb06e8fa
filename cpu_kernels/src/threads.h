// The threads that help whoever calls a kernel.
//
// A step calls about 150 kernels, tens of microseconds apart, and each takes a fraction of
// a millisecond. To wake a sleeping thread takes as long as what it could do in one of
// them; so these look for work for a while before they sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <system_error>
#include <thread>

#include "kernels.h"

namespace jaxkv {

class Helpers {
 public:
  // They live as long as the process.
  static Helpers& Get() {
    static Helpers& helpers = *new Helpers;
    return helpers;
  }

  // Runs task(0) ... task(count - 1), the caller doing its share. With more callers than
  // one, or more tasks than a ticket counts, a caller does all of its own.
  void Run(int64_t num_threads, int64_t count, const std::function<void(int64_t)>& task) {
    if (num_threads < 2 || count < 2 || count > kMostTasks || is_taken_.exchange(true)) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    try {
      for (; num_helpers_ < num_threads - 1; ++num_helpers_)
        std::thread([this] { Help(); }).detach();
    } catch (const std::system_error&) {  // no more threads: those there are do it
    }
    task_ = &task;
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> kEpochShift) + 1;
    ticket_.store(epoch << kEpochShift | uint64_t(count) << kCountShift);
    ticket_.notify_all();
    while (Work()) {
    }
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < count; ++spins)
      Pause(spins);
    is_taken_.store(false, std::memory_order_release);
  }

 private:
  // A ticket is which round of tasks it is, how many those are, and the next one. Who
  // draws a task by adding one has all three of the same round; and the round is not over
  // before that task is.
  static constexpr int kCountShift = 20, kEpochShift = 40;
  static constexpr uint64_t kMask = (uint64_t{1} << kCountShift) - 1;
  static constexpr int64_t kMostTasks = kMask / 2;  // helpers may draw a few too many
  static constexpr auto kLooking = std::chrono::microseconds(200);

  static bool HasTask(uint64_t ticket) {
    return (ticket & kMask) < (ticket >> kCountShift & kMask);
  }

  // Does a task, if there is one.
  bool Work() {
    if (!HasTask(ticket_.load(std::memory_order_acquire))) return false;
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (!HasTask(ticket)) return false;
    (*task_)(ticket & kMask);
    num_done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void Help() {
    while (true) {
      const auto start = std::chrono::steady_clock::now();
      for (int spins = 0; !Work(); ++spins) {
        if (spins % 64 == 63 && std::chrono::steady_clock::now() - start > kLooking) {
          const uint64_t ticket = ticket_.load(std::memory_order_acquire);
          if (!HasTask(ticket)) ticket_.wait(ticket);
          break;
        }
        Pause(spins);
      }
    }
  }

  static void Pause(int spins) {
    __builtin_ia32_pause();
    if (spins % 32 == 31) sched_yield();  // for XLA's own threads
  }

  std::atomic<uint64_t> ticket_ = 0;
  std::atomic<int64_t> num_done_ = 0;
  std::atomic<bool> is_taken_ = false;
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t num_helpers_ = 0;
};

}  // namespace jaxkv
