use super::*;

/// Every lane operation, on inputs that include the special values.
struct AllOps([f32; LANES], [f32; LANES], [f32; LANES]);

impl Kernel for AllOps {
    type Output = (Vec<[f32; LANES]>, f32, f32, bool);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (a, b, c) = (s.load(&self.0), s.load(&self.1), s.load(&self.2));
        let vectors = [
            s.splat(self.0[3]),
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, c),
            s.max(a, b),
            s.min(a, b),
            s.select_less(a, b, c, a),
        ];
        let mut out = Vec::with_capacity(vectors.len());
        for v in vectors {
            let mut lanes = [f32::NAN; LANES];
            s.store(v, &mut lanes);
            out.push(lanes);
        }
        (out, s.sum(c), s.largest(c), s.any_greater(a, b))
    }
}

fn expected(a: f32, b: f32, c: f32) -> [f32; 8] {
    [
        a + b,
        a - b,
        a * b,
        a / b,
        a.mul_add(b, c),
        if a > b { a } else { b },
        if a < b { a } else { b },
        if a < b { c } else { a },
    ]
}

#[test]
fn every_operation_is_lane_by_lane() {
    let a: [f32; LANES] =
        std::array::from_fn(|i| [1.5, -0.25, f32::NAN, f32::INFINITY][i % 4] * 1.25);
    let b: [f32; LANES] = std::array::from_fn(|i| [2.0, f32::NAN, 0.5, -3.0, 1.0][i % 5]);
    let c: [f32; LANES] = std::array::from_fn(|i| (i * 7 % 16) as f32 - 5.0);
    for isa in Isa::all() {
        let (vectors, sum, largest, any) = isa.run(AllOps(a, b, c));
        assert_eq!(vectors[0], [a[3]; LANES]);
        for lane in 0..LANES {
            for (op, want) in expected(a[lane], b[lane], c[lane]).into_iter().enumerate() {
                let got = vectors[op + 1][lane];
                let same = got.is_nan() && want.is_nan()
                    || got == want
                    || (got - want).abs() <= want.abs() * 1e-6;
                assert!(same, "{} op {op} lane {lane}: {got} for {want}", isa.name());
            }
        }
        assert_eq!((sum, largest, any), (40.0, 10.0, true));
        assert!(!isa.run(AllOps(c, c, c)).3);
    }
}

struct Widen([bf16; 32]);
impl Kernel for Widen {
    type Output = [[f32; LANES]; 2];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut out = [[0.0; LANES]; 2];
        // SAFETY: the array holds 32 values.
        let (first, second) = unsafe { s.load_bf16_pairs(self.0.as_ptr()) };
        s.store(first, &mut out[0]);
        s.store(second, &mut out[1]);
        out
    }
}

#[test]
fn bf16_pairs_widen_exactly() {
    let values: [bf16; 32] = std::array::from_fn(|i| bf16::from_f32((i as f32 - 9.0) * 1.37));
    for isa in Isa::all() {
        let [first, second] = isa.run(Widen(values));
        for lane in 0..LANES {
            assert_eq!(first[lane], values[2 * lane].to_f32(), "{}", isa.name());
            assert_eq!(second[lane], values[2 * lane + 1].to_f32(), "{}", isa.name());
        }
    }
}
