use super::*;
use crate::{ExpertConfig, Family, RankNumbers, config::tests::model, manifest::tensors};

fn ranges<T>(model: &ModelConfig, split: Split, of: impl Fn(&RankSlice) -> T) -> Vec<T> {
    (0..split.tp * split.pp).map(|rank| of(&split.slice(model, rank))).collect()
}

fn shaped(heads: usize, kv_heads: usize, layers: usize) -> ModelConfig {
    ModelConfig { heads, kv_heads, layers, ..model() }
}

/// The ranges follow each other from 0 to `end`, none empty.
fn check_partition(ranges: &[Range<usize>], end: usize, what: &str) {
    let mut next = 0;
    for range in ranges {
        assert_eq!(range.start, next, "{what}: {ranges:?}");
        assert!(range.end > range.start, "{what}: {ranges:?}");
        next = range.end;
    }
    assert_eq!(next, end, "{what}: {ranges:?}");
}

/// Every property that the engine relies on, for one model and split.
fn check(model: &ModelConfig, split: Split) {
    let what = format!("{}/{} heads, {split:?}", model.heads, model.kv_heads);
    let slices = ranges(model, split, RankSlice::clone);
    let group = model.heads / model.kv_heads;
    for stage in slices.chunks(split.tp) {
        let of = |part: fn(&RankSlice) -> &Range<usize>| -> Vec<_> {
            stage.iter().map(|slice| part(slice).clone()).collect()
        };
        check_partition(&of(|slice| &slice.heads), model.heads, &what);
        check_partition(&of(|slice| &slice.mlp), model.intermediate_size, &what);
        check_partition(&of(|slice| &slice.vocab), model.vocab_size, &what);
        for slice in stage {
            assert_eq!(slice.layers, stage[0].layers, "{what}");
            let kv = slice.heads.start / group..(slice.heads.end - 1) / group + 1;
            assert_eq!(slice.kv_heads, kv, "{what}: each query head finds its KV head");
            let kv = split.tp.div_ceil(model.kv_heads).min(2) == 1 || slice.kv_heads.len() == 1;
            assert!(kv, "{what}: a rank holds one replicated KV head");
        }
        let sizes: Vec<_> = stage.iter().map(|slice| slice.heads.len()).collect();
        let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
        assert!(most - least <= group, "{what}: {sizes:?} is uneven by more than a group");
    }
    let layers: Vec<_> = slices.iter().step_by(split.tp).map(|s| s.layers.clone()).collect();
    check_partition(&layers, model.layers, &what);
    assert!(slices.iter().all(|s| s.first_stage == (s.stage == 0)), "{what}");
    assert!(slices.iter().all(|s| s.last_stage == (s.stage + 1 == split.pp)), "{what}");
}

#[test]
fn every_legal_split_partitions_the_model() {
    for (heads, kv_heads) in [(9, 3), (8, 2), (32, 8), (4, 1), (7, 7), (15, 5), (12, 4), (1, 1)] {
        let model = shaped(heads, kv_heads, 5);
        let mut legal = 0;
        for devices in 1..=heads * 5 {
            for split in Split::legal(&model, devices) {
                assert_eq!(split.tp * split.pp, devices);
                split.check(&model).unwrap();
                check(&model, split);
                legal += 1;
            }
        }
        assert_eq!(legal, heads * 5, "every tp up to the heads, every pp up to the layers");
    }
}

/// Experts are cut inside, like one MLP; a rank holds its part of each.
#[test]
fn experts_are_cut_inside() {
    let experts = ExpertConfig {
        count: 8,
        per_token: 2,
        width: 48,
        renormalise: true,
        dense_layers: vec![1],
    };
    let model = ModelConfig { family: Family::Qwen3Moe, experts: Some(experts), ..shaped(8, 2, 3) };
    for tp in 1..=8 {
        let parts = ranges(&model, Split { tp, pp: 1 }, |slice| slice.expert_mlp.clone());
        check_partition(&parts, 48, &format!("tp {tp}"));
    }
    // Numbers of all ranks: what is whole on every rank (norms, routers) is there twice.
    let numbers = |tp| {
        let slices = ranges(&model, Split { tp, pp: 1 }, RankSlice::clone);
        let ranks = slices.iter().map(|slice| RankNumbers::of(&model, slice));
        ranks.fold((0, 0), |sum, rank| (sum.0 + rank.matrices, sum.1 + rank.vectors))
    };
    let (matrices, vectors) = numbers(1);
    assert_eq!(numbers(2), (matrices + 2 * 8 * 576, 2 * vectors));
    let all: usize = tensors(&model).iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    assert_eq!(matrices + vectors, all as u64);
    let narrow = ModelConfig {
        experts: model.experts.clone().map(|experts| ExpertConfig { width: 3, ..experts }),
        ..model
    };
    let refused = Split { tp: 4, pp: 1 }.check(&narrow).unwrap_err().to_string();
    assert!(refused.contains("tp is 4, but there are 3 columns of an expert"), "{refused}");
}

#[test]
fn widths_that_are_odd_or_small_are_cut() {
    for (size, tp, expected) in [
        (192, 2, vec![0..96, 96..192]),
        (176, 2, vec![0..96, 96..176]),
        (515, 2, vec![0..256, 256..515]),
        (192, 4, vec![0..64, 64..128, 128..160, 160..192]),
        (24, 2, vec![0..16, 16..24]),
        (24, 4, vec![0..8, 8..16, 16..20, 20..24]),
        (7, 5, vec![0..2, 2..4, 4..5, 5..6, 6..7]),
        (3, 3, vec![0..1, 1..2, 2..3]),
    ] {
        let found: Vec<_> = (0..tp).map(|rank| width(size, tp, rank)).collect();
        check_partition(&found, size, "width");
        assert_eq!(found, expected, "{size} over {tp}");
    }
}

#[test]
fn heads_are_uneven_where_they_must_be() {
    let heads = |heads, kv_heads, tp| {
        ranges(&shaped(heads, kv_heads, 1), Split { tp, pp: 1 }, |s| {
            (s.heads.clone(), s.kv_heads.clone())
        })
    };
    assert_eq!(heads(9, 3, 2), [(0..6, 0..2), (6..9, 2..3)]);
    assert_eq!(heads(8, 2, 4), [(0..2, 0..1), (2..4, 0..1), (4..6, 1..2), (6..8, 1..2)]);
    assert_eq!(heads(4, 2, 3), [(0..1, 0..1), (1..2, 0..1), (2..4, 1..2)]);
}

#[test]
fn stages_weigh_embedding_and_head() {
    let layers =
        |model: &ModelConfig, pp| ranges(model, Split { tp: 1, pp }, |slice| slice.layers.len());
    // SmolLM2: the table weighs as much as eight layers.
    assert_eq!(layers(&model(), 1), [30]);
    assert_eq!(layers(&model(), 2), [15, 15]);
    assert_eq!(layers(&model(), 4), [4, 11, 11, 4]);
    // A small vocabulary weighs nothing.
    let small = ModelConfig { vocab_size: 64, ..model() };
    assert_eq!(layers(&small, 4), [7, 8, 8, 7]);
    assert_eq!(layers(&shaped(9, 3, 2), 2), [1, 1]);
}

#[test]
fn refusals_list_what_can_run() {
    let refused = |tp, pp| Split { tp, pp }.check(&shaped(4, 2, 3)).unwrap_err().to_string();
    let message = refused(5, 1);
    assert!(message.contains("tp is 5, but there are 4 query heads"), "{message}");
    assert!(message.contains("tp 4 x pp 1, tp 2 x pp 2, tp 3 x pp 1"), "{message}");
    assert!(refused(1, 4).contains("pp is 4, but there are 3 layers"));
    assert!(refused(0, 1).contains("at least 1"));
    // A hostile size neither overflows nor loops.
    assert!(refused(usize::MAX, usize::MAX).contains("tp 4 x pp 3"));
}
