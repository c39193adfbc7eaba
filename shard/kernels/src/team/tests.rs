use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

#[test]
fn every_thread_runs_once_per_run() {
    for threads in [0, 1, 2, 3, 8] {
        let team = Team::new(threads);
        assert_eq!(team.threads(), threads.max(1));
        let counts: Vec<AtomicU64> = (0..team.threads()).map(|_| AtomicU64::new(0)).collect();
        for _ in 0..200 {
            team.run(&|worker| {
                counts[worker].fetch_add(1, Relaxed);
            });
        }
        assert!(counts.iter().all(|count| count.load(Relaxed) == 200), "{threads} threads");
    }
}

#[test]
fn wakes_workers_that_sleep() {
    let team = Team::new(3);
    let count = AtomicU64::new(0);
    for _ in 0..5 {
        thread::sleep(3 * YIELD);
        team.run(&|worker| {
            // Lets the caller reach its own sleep, too.
            if worker > 0 {
                thread::sleep(3 * YIELD);
            }
            count.fetch_add(1, Relaxed);
        });
    }
    assert_eq!(count.load(Relaxed), 15);
}

#[test]
fn teams_share_cores_without_deadlock() {
    let total = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let team = Team::new(3);
                for _ in 0..300 {
                    team.run(&|_| {
                        total.fetch_add(1, Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Relaxed), 4 * 3 * 300);
}

#[test]
fn callers_take_turns() {
    let team = Team::new(2);
    let inside = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..100 {
                    team.run(&|_| {
                        assert!(inside.fetch_add(1, SeqCst) < 2);
                        inside.fetch_sub(1, SeqCst);
                    });
                }
            });
        }
    });
}

fn panics_and_recovers(threads: usize, culprit: usize) {
    let team = Team::new(threads);
    let result = catch_unwind(AssertUnwindSafe(|| {
        team.run(&|worker| assert!(worker != culprit, "worker {culprit} fails"));
    }));
    let panic = result.expect_err("the panic reaches the caller");
    let message = panic.downcast_ref::<String>().expect("a formatted message");
    assert_eq!(message, &format!("worker {culprit} fails"));
    let count = AtomicU64::new(0);
    team.run(&|_| {
        count.fetch_add(1, Relaxed);
    });
    assert_eq!(count.load(Relaxed), threads as u64);
}

#[test]
fn a_panic_propagates_and_the_team_survives() {
    for (threads, culprit) in [(1, 0), (3, 0), (3, 2)] {
        panics_and_recovers(threads, culprit);
    }
}

#[test]
#[should_panic(expected = "run inside a run")]
fn a_nested_run_is_refused() {
    let team = Team::new(2);
    team.run(&|_| team.run(&|_| ()));
}

#[test]
fn share_covers_everything_once() {
    for (items, grain, workers) in
        [(0, 1, 3), (1, 1, 3), (10, 1, 3), (100, 16, 7), (7, 8, 2), (33, 8, 4), (64, 1, 64)]
    {
        let mut next = 0;
        for worker in 0..workers {
            let part = share(items, grain, worker, workers);
            assert_eq!(part.start, next);
            assert!(part.is_empty() || part.start.is_multiple_of(grain));
            assert!(part.len() <= items.div_ceil(grain).div_ceil(workers) * grain);
            next = part.end;
        }
        assert_eq!(next, items);
    }
}
