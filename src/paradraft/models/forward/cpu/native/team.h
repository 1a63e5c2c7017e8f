// A team of threads that works through the steps of a pass, and stays calm on a machine whose CPUs others use too.
//
// A step never waits for a thread that does not run. Its items lie in chunks; every thread takes chunks of its own range
// first and then of the others', so that the caller does the work of a helper that is late. Only a helper that the system
// takes off its CPU inside a chunk is waited for. That costs milliseconds where a step takes microseconds; where it comes
// so often that helpers do not pay, passes run on the caller alone for a while. Helpers without work soon sleep.
//
// A pass takes a free team, so that passes in several threads do not meet; together they use as many CPUs as one alone.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#if defined(__linux__) && !defined(PORTABLE)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "gemm.h"

constexpr int MOST_WORKERS = 64;
constexpr int SPINS = 500;                           // looks at what another thread will change, before others may run
constexpr int64_t AWAKE_NS = 2'000'000;              // how long a helper without work looks for some before it sleeps
constexpr int64_t STALL_NS = 400'000;                // a longer wait means that a thread was taken off its CPU
constexpr int64_t WORTH = 3;                         // with helpers a pass must run this many times longer than it waits
constexpr int64_t MOST_CREDIT_NS = 30'000'000;       // time with helpers that makes up for later waits
constexpr int64_t ALONE_PER_STALL = 25;              // else passes run on the caller alone, for this many times the wait
constexpr int64_t LONGEST_ALONE_NS = 1'000'000'000;

static inline int64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

static inline void spin_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#if defined(__linux__) && !defined(PORTABLE)
/// Sleeps while a word has a value; returns at once if it has another.
static inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static inline void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

/// The CPUs that a thread may run on.
struct Cpus {
    cpu_set_t set = {};

    static Cpus own() {
        Cpus found;
        sched_getaffinity(0, sizeof found.set, &found.set);
        return found;
    }
    bool operator==(const Cpus& other) const { return CPU_EQUAL(&set, &other.set); }
};
#else
constexpr long NAP_NS = 100'000; // between two looks at the word

static inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    for (timespec nap = {0, NAP_NS}; word.load() == value;) nanosleep(&nap, nullptr);
}

static inline void wake_all(std::atomic<uint32_t>&) {} // sleepers look by themselves

/// Threads are not bound to CPUs here.
struct Cpus {
    static Cpus own() { return {}; }
    bool operator==(const Cpus&) const { return true; }
};
#endif

/// The chunks `next` to `end` of step number `step` that a worker still has; in one word, so that it changes at once.
struct Range {
    uint32_t step;
    uint16_t next, end;
};

class Team {
  public:
    /// Calls `work(share, worker)` for shares of about `items` items that together are all `count` of them, and returns when
    /// they are done. `worker` is below `MOST_WORKERS`, and no two threads have the same.
    template <class Work> void each(int64_t count, int64_t items, Work work) {
        int64_t chunks = std::min<int64_t>((count + items - 1) / items, UINT16_MAX);
        if (size == 1 || chunks <= 1) {
            work(Span(count, 0, 1), 0);
            return release_tiles();
        }
        auto call = [](void* work, Span share, int worker) { (*(Work*)work)(share, worker); };
        job.call.store(call, std::memory_order_relaxed);
        job.work.store(&work, std::memory_order_relaxed);
        job.count.store(count, std::memory_order_relaxed);
        job.chunks.store(chunks, std::memory_order_relaxed);
        job.size.store(size, std::memory_order_relaxed);
        step++;
        for (int worker = 0; worker < size; worker++) {
            Span share(chunks, worker, size);
            Range range = {step, uint16_t(share.first), uint16_t(share.last)};
            workers[worker].range.store(same_bits<uint64_t>(range), std::memory_order_release);
        }
        if (asleep.load(std::memory_order_relaxed)) wake(); // in a step that took long, helpers without work fall asleep
        ordered += chunks;
        int64_t begun = clock_ns(CLOCK_MONOTONIC);
        int64_t own = std::max<int64_t>(take_part(0, step), 1);
        if (is_finished()) return;
        int64_t ended = clock_ns(CLOCK_MONOTONIC);
        for (int spin = 0; !is_finished(); spin++) spin < SPINS ? spin_once() : (void)sched_yield();
        int64_t waited = clock_ns(CLOCK_MONOTONIC) - ended;
        // A helper may have begun its last chunk when the caller ended its own.
        if (waited > STALL_NS + 2 * (ended - begun) / own) lost_ns += waited;
    }

    /// Runs `body(team)` on the caller and at most `threads - 1` helpers, which take part in its steps.
    template <class Body> static void run(int64_t threads, Body body) {
        int64_t begun = clock_ns(CLOCK_MONOTONIC);
        Pool& pool = Pool::get();
        int64_t passes = pool.passes.fetch_add(1) + 1;
        bool is_alone = begun < pool.alone_until.load(std::memory_order_relaxed);
        int64_t size = is_alone ? 1 : threads / passes;
        Team& team = pool.take(size > 1);
        team.open(std::clamp<int64_t>(size, 1, MOST_WORKERS));
        int64_t worked = team.size > 1 ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : 0;
        body(team);
        if (team.size > 1) {
            int64_t now = clock_ns(CLOCK_MONOTONIC);
            int64_t away = now - begun - (clock_ns(CLOCK_THREAD_CPUTIME_ID) - worked); // or another thread ran in its place
            int64_t lost = std::max(team.lost_ns, away > STALL_NS ? away : 0);
            pool.judge(now, now - begun - lost, lost);
        }
        pool.give(team);
        pool.passes.fetch_sub(1);
    }

  private:
    struct alignas(64) Worker {
        std::atomic<uint64_t> range{0};
        std::atomic<int64_t> finished{0}; // chunks that it has done, of all steps; it alone changes this
    };

    struct alignas(64) Job {
        std::atomic<void (*)(void*, Span, int)> call;
        std::atomic<void*> work;
        std::atomic<int64_t> count, chunks, size;
    };

    /// The teams of the process, and what passes have learnt of the machine.
    struct Pool {
        std::atomic<int64_t> passes{0}; // that run now
        std::atomic<int64_t> alone_until{0};
        std::atomic<int64_t> credit_ns{0};
        std::mutex mutex;
        std::vector<Team*> free;

        /// Never deleted, because helpers run as long as the process. A child process has none and begins anew.
        static Pool& get() {
            static std::atomic<Pool*> pool{nullptr};
            static const int is_ready [[maybe_unused]] = [] {
                pool = new Pool;
                return pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
            }();
            return *pool;
        }

        /// Decides after a pass whether helpers pay: other programs take a CPU away for as long as they leave it.
        void judge(int64_t now, int64_t ran, int64_t lost) {
            int64_t credit = std::min(credit_ns.load(std::memory_order_relaxed) + ran, MOST_CREDIT_NS) - WORTH * lost;
            if (credit < 0) alone_until = now + std::min(lost * ALONE_PER_STALL, LONGEST_ALONE_NS);
            credit_ns.store(std::max<int64_t>(credit, 0), std::memory_order_relaxed);
        }

        /// The team that was given back last: its helpers are the likeliest to be awake. Where they are to take part, one
        /// whose helpers run on the CPUs of the caller.
        Team& take(bool wants_helpers) {
            Cpus cpus;
            if (wants_helpers) cpus = Cpus::own();
            std::lock_guard lock(mutex);
            for (size_t i = free.size(); i-- > 0;) {
                Team* team = free[i];
                if (wants_helpers && team->helpers && !(team->cpus == cpus)) continue;
                free.erase(free.begin() + i);
                return *team;
            }
            return *new Team;
        }

        void give(Team& team) {
            std::lock_guard lock(mutex);
            free.push_back(&team);
        }
    };

    Job job;
    Worker workers[MOST_WORKERS];
    alignas(64) std::atomic<uint32_t> bell{0}; // counts the passes with helpers
    std::atomic<int> asleep{0};
    alignas(64) int size = 1, helpers = 0; // of this pass, the caller included; threads there are
    uint32_t step = 0;
    int64_t ordered = 0; // chunks of all steps so far
    int64_t lost_ns = 0; // in this pass
    Cpus cpus; // of the helpers, which are those of the thread that hired them first

    /// Begins a pass with `wanted` threads.
    void open(int wanted) {
        lost_ns = 0;
        size = wanted;
        if (size == 1) return;
        if (helpers + 1 < size) hire();
        wake();
    }

    void wake() {
        bell.fetch_add(1);
        if (asleep.load()) wake_all(bell);
    }

    /// Starts the helpers that are missing, or as many as the system gives. Signals are not for them.
    void hire() {
        if (!helpers) cpus = Cpus::own();
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; helpers + 1 < size; helpers++) std::thread(&Team::help, this, helpers + 1).detach();
        } catch (const std::system_error&) {
            size = helpers + 1;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    bool is_finished() const {
        int64_t finished = 0;
        for (int worker = 0; worker <= helpers; worker++) finished += workers[worker].finished.load(std::memory_order_acquire);
        return finished == ordered;
    }

    /// Does chunks of a step, the worker's own first, until none is left. Returns how many.
    int64_t take_part(int worker, uint32_t number) {
        int64_t taken = 0;
        int64_t among = job.size.load(std::memory_order_relaxed);
        for (int64_t i = 0; i < among; i++) {
            std::atomic<uint64_t>& range = workers[(worker + i) % among].range;
            for (;;) {
                uint64_t found = range.load(std::memory_order_acquire);
                Range rest = same_bits<Range>(found);
                if (rest.step != number || rest.next == rest.end) break;
                // The job is read first and the chunk taken then: while one is left, the job is still that of this step.
                auto call = job.call.load(std::memory_order_relaxed);
                void* work = job.work.load(std::memory_order_relaxed);
                int64_t count = job.count.load(std::memory_order_relaxed), chunks = job.chunks.load(std::memory_order_relaxed);
                Range less = {rest.step, uint16_t(rest.next + 1), rest.end};
                if (!range.compare_exchange_strong(found, same_bits<uint64_t>(less), std::memory_order_acq_rel)) continue;
                call(work, Span(count, rest.next, chunks), worker);
                std::atomic<int64_t>& finished = workers[worker].finished;
                finished.store(finished.load(std::memory_order_relaxed) + 1, std::memory_order_release);
                taken++;
            }
        }
        release_tiles();
        return taken;
    }

    /// The life of a helper.
    [[noreturn]] void help(int worker) {
        std::atomic<uint64_t>& range = workers[worker].range;
        for (uint32_t last = 0;;) {
            uint32_t rung = bell.load();
            auto is_new = [&] { return same_bits<Range>(range.load(std::memory_order_acquire)).step != last; };
            for (int spin = 0; spin < SPINS && !is_new(); spin++) spin_once();
            for (int64_t begun = clock_ns(CLOCK_MONOTONIC); !is_new() && clock_ns(CLOCK_MONOTONIC) - begun < AWAKE_NS;)
                sched_yield();
            if (is_new()) {
                last = same_bits<Range>(range.load(std::memory_order_acquire)).step;
                take_part(worker, last);
                continue;
            }
            asleep.fetch_add(1);
            sleep_while(bell, rung); // returns at once if a pass has begun since
            asleep.fetch_sub(1);
        }
    }
};
