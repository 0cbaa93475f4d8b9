// A work-stealing parallel loop for passes of less than a millisecond to a second, robust to other busy processes.
//
// An OpenMP loop with a static schedule ends in a barrier that all threads must reach. If another process occupies a
// core, each loop waits for the descheduled thread, up to a time slice (3 ms on Linux) and several times per layer:
// with one of two cores busy, decoding kept 0.08 to 0.17 of its speed. Here each thread starts with its own contiguous
// range, so that its caches keep the weights that it read before, and then steals from the ends of other threads'
// ranges. A loop ends when all indices are done, even if some threads never started. Waiting threads spin, then yield,
// then sleep, which leaves their core to a thread that was descheduled while computing an index.
//
// The number of threads is not reduced on a busy machine: with one of two cores busy, two threads keep 0.56 of their
// speed, and one thread has 0.53.
//
// Results do not depend on which thread computes an index, provided that indices write to different memory.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int PAUSES = 256;  // spins before a thread yields, and between yields: some microseconds
// Time for which a thread yields before it sleeps. IDLE is for workers, which stay awake between passes because waking
// them up would delay every pass; LATE is for the caller.
constexpr microseconds IDLE{500}, LATE{100};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Blocks a thread until another thread makes a condition true.
class Gate {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> closed{false};

  public:
    template <typename Condition>
    void wait(const Condition& condition, microseconds awake) {
        const auto spun = [&] {
            for (int i = 0; i < PAUSES; i++, pause())
                if (condition()) return true;
            return false;
        };
        if (spun()) return;
        for (const auto until = Clock::now() + awake; Clock::now() < until; sched_yield())
            if (spun()) return;
        std::unique_lock<std::mutex> lock(mutex);
        closed.store(true);
        changed.wait(lock, condition);
        closed.store(false);
    }

    // Call it after a sequentially consistent store that makes the condition true.
    void open() {
        if (!closed.load()) return;
        std::lock_guard<std::mutex> lock(mutex);
        changed.notify_all();
    }
};

// A calling thread (member 0) and its workers.
class Team {
    struct alignas(64) Member {
        std::atomic<uint64_t> range{0};  // remaining indices: the first one, and in the high half one past the last
        std::atomic<uint32_t> calls{0};  // number of loops for which the member was woken
        Gate gate;
    };

    std::vector<std::unique_ptr<Member>> members;
    void (*body)(const void*, int64_t) = nullptr, (*after)() = nullptr;
    const void* context = nullptr;
    alignas(64) std::atomic<int64_t> remaining{0};  // number of unfinished indices
    Gate finished;

    static uint64_t packed(uint64_t first, uint64_t last) { return last << 32 | first; }

    // Takes the first index of a thread's own range, or the last index of another thread's.
    static bool take(Member& member, bool from_front, int64_t& index) {
        uint64_t range = member.range.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = uint32_t(range), last = uint32_t(range >> 32);
            if (first >= last) return false;
            index = from_front ? first : last - 1;
            const uint64_t next = from_front ? packed(first + 1, last) : packed(first, last - 1);
            // Acquire, so that `body` and `context` belong to the index's loop, which cannot end before the index is
            // done.
            if (member.range.compare_exchange_weak(range, next, std::memory_order_acquire, std::memory_order_relaxed))
                return true;
        }
    }

    void work(size_t self) {
        int64_t index, done = 0;
        for (size_t i = 0; i < members.size(); i++) {
            Member& member = *members[(self + i) % members.size()];
            for (; take(member, i == 0, index); done++) body(context, index);
        }
        if (!done) return;
        if (after) after();
        if (remaining.fetch_sub(done) == done) finished.open();
    }

    void serve(size_t self) {
        Member& member = *members[self];
        for (uint32_t seen = 0;;) {
            member.gate.wait([&] { return member.calls.load() != seen; }, IDLE);
            seen = member.calls.load();
            work(self);
        }
    }

  public:
    explicit Team(int threads) {
        for (int i = 0; i < threads; i++) members.push_back(std::make_unique<Member>());
        sigset_t all, before;  // workers block all signals, so that the program's own threads handle them
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 1; i < threads; i++) std::thread(&Team::serve, this, i).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    int size() const { return int(members.size()); }

    void run(int64_t count, void (*of)(const void*, int64_t), const void* with, void (*then)()) {
        const int64_t sharing = std::min<int64_t>(size(), count);
        body = of, context = with, after = then;
        remaining.store(count, std::memory_order_relaxed);
        for (int64_t i = 0; i < sharing; i++)
            members[i]->range.store(packed(count * i / sharing, count * (i + 1) / sharing), std::memory_order_release);
        for (int64_t i = 1; i < sharing; i++) {
            members[i]->calls.fetch_add(1);
            members[i]->gate.open();
        }
        work(0);
        finished.wait([&] { return !remaining.load(); }, LATE);
    }
};

// Teams of ended threads, for reuse by other threads.
class Teams {
    std::mutex mutex;
    std::vector<Team*> idle;

    static Teams& shared() {
        static Teams* teams = new Teams;  // never destroyed: workers outlive static objects
        return *teams;
    }

    // The team of the current thread; every calling thread has its own.
    struct Lease {
        Team* team = nullptr;

        Lease() {  // a forked process has no workers, so it drops all teams
            static const int registered = pthread_atfork(
                [] { shared().mutex.lock(); }, [] { shared().mutex.unlock(); },
                [] { thread_lease().team = nullptr, shared().idle.clear(), shared().mutex.unlock(); });
            (void)registered;
        }
        ~Lease() { end(); }

        void end() {
            if (!team) return;
            std::lock_guard<std::mutex> lock(shared().mutex);
            shared().idle.push_back(team);
            team = nullptr;
        }
    };

    static Lease& thread_lease() {
        static thread_local Lease lease;
        return lease;
    }

    Team* take(int threads) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto fits = [&](Team* team) { return team->size() == threads; };
        const auto fitting = std::find_if(idle.begin(), idle.end(), fits);
        if (fitting == idle.end()) return new Team(threads);
        Team* team = *fitting;
        idle.erase(fitting);
        return team;
    }

  public:
    static Team& of_this_thread(int threads) {
        Lease& lease = thread_lease();
        if (!lease.team || lease.team->size() != threads) {
            lease.end();
            lease.team = shared().take(threads);
        }
        return *lease.team;
    }
};

// Calls body(index) for every index below `count`, at most 2^32, on up to `threads` threads, each of which then calls
// after(), unless it is null.
template <typename Body>
void parallel(int threads, int64_t count, const Body& body, void (*after)() = nullptr) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        if (after) after();
        return;
    }
    Teams::of_this_thread(threads).run(
        count, [](const void* with, int64_t i) { (*static_cast<const Body*>(with))(i); }, &body, after);
}

}  // namespace
