//! A seeded random program that all ranks run, and what each of them must hold after every step,
//! computed without any collective.

use trireme_collectives::{Collective, World};

use crate::random::Random;

#[derive(Clone, Debug)]
enum Step {
    AllReduce {
        global: bool,
        len: usize,
    },
    AllGather {
        global: bool,
        len: usize,
    },
    Broadcast {
        global: bool,
        root: usize,
        len: usize,
    },
    Barrier {
        global: bool,
    },
    /// Messages of one rank to another over the global group: `(len, as floats)`.
    Messages {
        from: usize,
        to: usize,
        messages: Vec<(usize, bool)>,
    },
}

/// Lengths around every boundary: nothing, one, odd, the hidden size of a small model, a chunk and
/// a ring with a neighbour on each side, and several of them.
fn length(random: &mut Random) -> usize {
    const CHUNK_FLOATS: usize = (256 << 10) / 4;
    const RING_FLOATS: usize = (1 << 20) / 4;
    match random.below(40) {
        0 => 0,
        1 => 1,
        2 => CHUNK_FLOATS - 1 + random.below(3),
        3 => RING_FLOATS - 3 + random.below(4),
        4 => 3 * CHUNK_FLOATS + random.below(100),
        5..=9 => 8000 + random.below(8000),
        10..=20 => 576,
        _ => random.below(2000),
    }
}

fn step(random: &mut Random, tp: usize, ranks: usize) -> Step {
    let global = random.below(3) == 0;
    let len = length(random);
    match random.below(10) {
        0..=3 => Step::AllReduce { global, len },
        4..=5 => Step::AllGather { global, len },
        6 => Step::Broadcast { global, root: random.below(if global { ranks } else { tp }), len },
        7 => Step::Barrier { global },
        _ => {
            let from = random.below(ranks);
            let to = (from + random.below(ranks)) % ranks;
            let count = 1 + random.below(4);
            let messages = (0..count)
                .map(|_| {
                    let len = if from == to { random.below(500) } else { length(random) };
                    (len, random.below(2) == 0)
                })
                .collect();
            Step::Messages { from, to, messages }
        }
    }
}

/// What `rank` (of the world) contributes to step `index`.
fn contribution(seed: u64, index: usize, rank: usize, len: usize) -> Vec<f32> {
    let mut random = Random(seed ^ ((index as u64) << 32) ^ ((rank as u64) << 16));
    (0..len).map(|_| random.float()).collect()
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_ne_bytes()).collect()
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|float| float.to_bits()).collect()
}

/// Runs `steps` random steps as `rank` and checks everything it sees.
pub fn run(world: &mut World, seed: u64, steps: usize, (tp, pp): (usize, usize), rank: usize) {
    let ranks = tp * pp;
    let stage = rank / tp;
    let mut random = Random(seed);
    let mut jitter = Random(seed ^ rank as u64 ^ 0xface);
    for index in 0..steps {
        let step = step(&mut random, tp, ranks);
        if jitter.below(16) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(jitter.below(100) as u64));
        }
        let in_stage = matches!(
            &step,
            Step::AllReduce { global: false, .. }
                | Step::AllGather { global: false, .. }
                | Step::Broadcast { global: false, .. }
                | Step::Barrier { global: false }
        );
        let (group, members): (&mut dyn Collective, Vec<usize>) = match in_stage {
            true => (&mut *world.tensor, (stage * tp..(stage + 1) * tp).collect()),
            false => (&mut *world.global, (0..ranks).collect()),
        };
        assert_eq!(group.size(), members.len());
        let of = |member: usize, len| contribution(seed, index, member, len);
        let what = format!("seed {seed}, step {index} on rank {rank}: {step:?}");
        perform(group, step, &members, rank, of, &what);
    }
}

fn perform(
    group: &mut dyn Collective,
    step: Step,
    members: &[usize],
    rank: usize,
    of: impl Fn(usize, usize) -> Vec<f32>,
    what: &str,
) {
    match step {
        Step::AllReduce { len, .. } => {
            let mut data = of(rank, len);
            group.all_reduce_sum(&mut data).expect(what);
            let mut expected = of(members[0], len);
            for &member in &members[1..] {
                expected.iter_mut().zip(of(member, len)).for_each(|(sum, part)| *sum += part);
            }
            assert!(bits(&data) == bits(&expected), "{what}");
        }
        Step::AllGather { len, .. } => {
            let mine = bytes(&of(rank, len));
            let mut all = vec![0; mine.len() * members.len()];
            group.all_gather(&mine, &mut all).expect(what);
            let expected: Vec<u8> =
                members.iter().flat_map(|&member| bytes(&of(member, len))).collect();
            assert!(all == expected, "{what}");
        }
        Step::Broadcast { root, len, .. } => {
            let mut data = bytes(&of(rank, len));
            group.broadcast(root, &mut data).expect(what);
            assert!(data == bytes(&of(members[root], len)), "{what}");
        }
        Step::Barrier { .. } => group.barrier().expect(what),
        Step::Messages { from, to, messages } => {
            if rank == from {
                messages.iter().for_each(|&message| send(group, to, message, &of, rank, what));
            }
            if rank == to {
                messages.iter().for_each(|&message| receive(group, from, message, &of, what));
            }
        }
    }
}

type Contribution<'a> = &'a dyn Fn(usize, usize) -> Vec<f32>;

fn send(
    group: &mut dyn Collective,
    to: usize,
    (len, floats): (usize, bool),
    of: Contribution<'_>,
    rank: usize,
    what: &str,
) {
    let data = of(rank, len);
    match floats {
        true => group.send(to, &data).expect(what),
        false => group.send_bytes(to, &bytes(&data)).expect(what),
    }
}

fn receive(
    group: &mut dyn Collective,
    from: usize,
    (len, floats): (usize, bool),
    of: Contribution<'_>,
    what: &str,
) {
    let received = if floats {
        let mut data = vec![0.0; len];
        group.recv(from, &mut data).expect(what);
        bytes(&data)
    } else {
        let mut data = vec![0; 4 * len];
        group.recv_bytes(from, &mut data).expect(what);
        data
    };
    assert!(received == bytes(&of(from, len)), "{what}");
}
