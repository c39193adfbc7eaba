//! What ends an operation other than its completion.

use std::time::Duration;

use trireme_collectives::{Collective, CollectiveError, World, local};

type Outcome = Result<(), CollectiveError>;
type Act = fn(&mut World) -> Outcome;

const MINUTE: Duration = Duration::from_secs(60);

/// Runs one act a rank on a tensor group and returns how each ended.
fn outcomes(deadline: Duration, acts: &[Act]) -> Vec<Outcome> {
    std::thread::scope(|scope| {
        let worlds = local::worlds(acts.len(), 1);
        let threads: Vec<_> = worlds
            .into_iter()
            .zip(acts)
            .map(|(mut world, act)| {
                scope.spawn(move || {
                    world.tensor.set_deadline(deadline);
                    act(&mut world)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn reduce(world: &mut World, len: usize) -> Outcome {
    world.tensor.all_reduce_sum(&mut vec![1.0; len])
}

fn nothing(_: &mut World) -> Outcome {
    Ok(())
}

#[track_caller]
fn assert_mismatch(outcome: &Outcome, detail: &str) {
    match outcome {
        Err(CollectiveError::Mismatch { detail: found, .. }) => {
            assert!(found.contains(detail), "{found} does not say {detail}");
        }
        other => panic!("{detail}: {other:?}"),
    }
}

#[test]
fn ranks_that_disagree_all_get_a_mismatch() {
    fn check(first: Act, second: Act, detail: &str) {
        for acts in [[first, second], [second, first]] {
            outcomes(MINUTE, &acts).iter().for_each(|outcome| assert_mismatch(outcome, detail));
        }
    }
    check(|w| reduce(w, 5), |w| reduce(w, 6), "all_reduce_sum of 20 bytes");
    check(|w| reduce(w, 0), |w| reduce(w, 1), "all_reduce_sum of 0 bytes");
    // The first round of a long call is enough.
    check(|w| reduce(w, 200_000), |w| reduce(w, 300_000), "all_reduce_sum of 1200000 bytes");
    check(|w| reduce(w, 5), |w| w.tensor.barrier(), "barrier of 0 bytes");
    check(
        |w| w.tensor.all_gather(&[1; 20], &mut [0; 40]),
        |w| reduce(w, 5),
        "all_gather of 20 bytes",
    );
    check(
        |w| w.tensor.broadcast(0, &mut [1; 4]),
        |w| w.tensor.broadcast(1, &mut [1; 4]),
        "broadcast of 4 bytes from rank 1",
    );
}

#[test]
fn a_call_that_is_wrong_by_itself_is_a_mismatch() {
    fn check(act: Act, detail: &str) {
        assert_mismatch(&outcomes(MINUTE, &[act, nothing])[0], detail);
    }
    check(|w| w.tensor.all_gather(&[1; 3], &mut [0; 7]), "7 bytes to gather 2 times 3 bytes");
    check(|w| w.tensor.broadcast(2, &mut [0; 7]), "rank 2 of a group of 2");
    check(|w| w.tensor.send(2, &[1.0]), "rank 2 of a group of 2");
    check(|w| w.tensor.recv(9, &mut [1.0]), "rank 9 of a group of 2");
    check(|w| w.tensor.send_bytes(0, &vec![0; 1 << 20]), "from a rank to itself");
}

#[test]
fn a_message_of_another_length_or_kind_is_a_mismatch() {
    fn check(receive: Act, detail: &str) {
        let send: Act = |w| w.tensor.send(1, &[1.0, 2.0]);
        assert_mismatch(&outcomes(MINUTE, &[send, receive])[1], detail);
    }
    check(|w| w.tensor.recv(0, &mut [0.0; 3]), "sent send of 8 bytes");
    check(|w| w.tensor.recv_bytes(0, &mut [0; 8]), "sent send of 8 bytes");
}

#[test]
fn a_deadline_names_the_missing_rank_and_ends_the_peers_too() {
    fn check(act: Act, operation: &str) {
        // Rank 1 never comes; rank 2 would wait for a minute.
        let patient: Act = |w| {
            w.tensor.set_deadline(MINUTE);
            w.tensor.recv(1, &mut [0.0])
        };
        let ended = outcomes(Duration::from_millis(50), &[act, nothing, patient]);
        match &ended[0] {
            Err(CollectiveError::Deadline { operation: found, rank, size, missing, waited_ms }) => {
                assert_eq!((*found, *rank, *size, *missing), (operation, 0, 3, 1));
                assert!(*waited_ms >= 50, "{waited_ms} ms");
            }
            other => panic!("{operation}: {other:?}"),
        }
        let aborted = matches!(ended[2], Err(CollectiveError::Aborted { operation: "recv", .. }));
        assert!(aborted, "{operation}: {:?}", ended[2]);
    }
    check(|w| w.tensor.barrier(), "barrier");
    check(|w| reduce(w, 10), "all_reduce_sum");
    check(|w| w.tensor.recv(1, &mut [0.0]), "recv");
    check(|w| w.tensor.send(1, &vec![0.0; 1 << 20]), "send");
}

#[test]
fn an_abort_ends_every_wait_and_every_later_call() {
    let worlds = local::worlds(3, 1);
    let abort = worlds[0].abort.clone();
    let waits: [Act; 3] = [
        |w| w.tensor.barrier(),
        |w| w.global.recv(0, &mut [0.0]),
        |w| w.tensor.send(0, &vec![0.0; 1 << 20]),
    ];
    std::thread::scope(|scope| {
        let act = |(mut world, wait): (World, Act)| {
            scope.spawn(move || (wait(&mut world), world.global.barrier()))
        };
        let threads: Vec<_> = worlds.into_iter().zip(waits).map(act).collect();
        // Let them fall asleep; whether they do changes what is tested, not the outcome.
        std::thread::sleep(Duration::from_millis(30));
        abort.abort();
        for thread in threads {
            let (waiting, later) = thread.join().expect("no panic");
            assert!(matches!(waiting, Err(CollectiveError::Aborted { .. })), "{waiting:?}");
            assert!(matches!(later, Err(CollectiveError::Aborted { .. })), "{later:?}");
        }
    });
}

#[test]
fn a_rank_that_panics_ends_its_peers() {
    let mut worlds = local::worlds(2, 1);
    let doomed = worlds.pop().expect("rank 1");
    let thread = std::thread::spawn(move || {
        let _doomed = doomed;
        std::panic::resume_unwind(Box::new("a bug in a layer"));
    });
    let ended = worlds[0].tensor.barrier();
    assert!(matches!(ended, Err(CollectiveError::Aborted { .. })), "{ended:?}");
    assert!(thread.join().is_err());
}

#[test]
fn a_rank_that_ends_in_peace_leaves_its_messages() {
    let mut worlds = local::worlds(2, 1);
    let mut first = worlds.remove(0);
    first.global.send_bytes(1, b"last words").expect("buffered");
    drop(first);
    let mut received = [0; 10];
    worlds[0].global.recv_bytes(0, &mut received).expect("still there");
    assert_eq!(&received, b"last words");
}

#[test]
fn small_messages_never_wait_for_the_receiver() {
    let mut worlds = local::worlds(1, 8);
    let mut last = worlds.pop().expect("rank 7");
    last.global.set_deadline(Duration::ZERO);
    let token_return = vec![7; 64 << 10];
    // One for each of the `pp + 1` steps in flight.
    for step in 0..=8 {
        last.global.send_bytes(0, &token_return).unwrap_or_else(|e| panic!("step {step}: {e}"));
    }
}

#[test]
fn a_group_of_one_needs_nobody() {
    let mut world = local::worlds(1, 1).remove(0);
    world.tensor.set_deadline(Duration::ZERO);
    let group: &mut dyn Collective = &mut *world.tensor;
    let mut data = [1.5, -0.0];
    group.all_reduce_sum(&mut data).expect("alone");
    assert_eq!(data.map(f32::to_bits), [1.5f32, -0.0].map(f32::to_bits));
    let mut all = [0; 3];
    group.all_gather(&[1, 2, 3], &mut all).expect("alone");
    assert_eq!(all, [1, 2, 3]);
    group.broadcast(0, &mut all).expect("alone");
    group.barrier().expect("alone");
    group.send(0, &data).expect("alone");
    let mut received = [0.0; 2];
    group.recv(0, &mut received).expect("alone");
    assert_eq!(received.map(f32::to_bits), data.map(f32::to_bits));
}
