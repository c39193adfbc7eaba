//! The random program on threads, over both backends.

use std::time::Duration;

use trireme_collectives::{World, local, shared_memory};

use crate::processes::{fresh_name, object_exists};
use crate::script;

fn check(worlds: Vec<World>, seed: u64, steps: usize, plan: (usize, usize)) {
    std::thread::scope(|scope| {
        for (rank, mut world) in worlds.into_iter().enumerate() {
            scope.spawn(move || script::run(&mut world, seed, steps, plan, rank));
        }
    });
}

#[test]
fn random_programs_match_the_model() {
    let plans = [(1, 1), (2, 1), (3, 1), (5, 1), (6, 1), (1, 2), (1, 4), (2, 2), (2, 3), (3, 2)];
    for (index, plan) in plans.into_iter().enumerate() {
        check(local::worlds(plan.0, plan.1), 100 + index as u64, 150, plan);
    }
}

#[test]
fn one_object_serves_threads_too() {
    let name = fresh_name();
    let worlds = std::thread::scope(|scope| {
        let join = |rank| shared_memory::join(&name, 2, 1, rank, Duration::from_secs(30));
        let threads = [1, 0].map(|rank| scope.spawn(move || join(rank).expect("joined")));
        let mut worlds: Vec<World> =
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        worlds.reverse();
        worlds
    });
    assert!(!object_exists(&name));
    check(worlds, 7, 100, (2, 1));
}
