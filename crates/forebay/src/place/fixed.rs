//! Binary logarithms in fixed point and back, by tables: a decision takes one and goes back three times, and the library's
//! functions, with their conversions, were half of what it cost.

use std::sync::LazyLock;

/// Bits behind the point.
pub(super) const BITS: u32 = 20;
/// One.
pub(super) const ONE: i32 = 1 << BITS;
/// Steps of a table for one octave, as a power of two.
const FINE: u32 = 6;
const STEPS: usize = 1 << FINE;
/// Bits of a fixed-point number below a table's step.
const REST: u32 = BITS - FINE;

pub(super) struct Tables {
    /// Logarithms of 1 to 2, and powers of two of 0 to 1.
    logs: [i32; STEPS + 1],
    powers: [f64; STEPS],
}

/// The tables; made once.
#[inline]
pub(super) fn tables() -> &'static Tables {
    static TABLES: LazyLock<Tables> = LazyLock::new(|| {
        let part = |i: usize| i as f64 / STEPS as f64;
        Tables {
            logs: std::array::from_fn(|i| from((1.0 + part(i)).log2())),
            powers: std::array::from_fn(|i| part(i).exp2()),
        }
    });
    &TABLES
}

/// The nearest that there is.
pub(super) fn from(x: f64) -> i32 {
    (x * f64::from(ONE)).round() as i32
}

pub(super) fn to_float(x: i32) -> f64 {
    f64::from(x) / f64::from(ONE)
}

impl Tables {
    /// To 50 millionths; of 0 it is that of 1.
    #[inline]
    pub(super) fn log2(&self, n: u64) -> i32 {
        let n = n.max(1);
        let whole = n.ilog2();
        // The number's bits behind the first one, at the top.
        let part = (n << (63 - whole) << 1) >> (64 - BITS);
        let (i, rest) = ((part >> REST) as usize & (STEPS - 1), (part & ((1 << REST) - 1)) as i64);
        let (a, b) = (self.logs[i], self.logs[i + 1]);
        ((whole as i32) << BITS) + a + ((i64::from(b - a) * rest) >> REST) as i32
    }

    /// To 60 millionths; never 0, and finite.
    #[inline]
    pub(super) fn exp2(&self, x: i32) -> f64 {
        const PART: f64 = std::f64::consts::LN_2 / (1u64 << BITS) as f64;
        let power = self.powers[(x >> REST) as usize & (STEPS - 1)];
        let rest = f64::from(x & ((1 << REST) - 1)) * PART;
        let whole = ((x >> BITS) + 1023).clamp(1, 2046);
        (power + power * rest) * f64::from_bits((whole as u64) << 52)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_are_near_enough() {
        let t = tables();
        for n in (0..62).flat_map(|e| [1u64 << e, (1 << e) + 1, (1 << e) * 4 / 3, (1 << e) * 2 - 1]).filter(|n| *n > 0)
        {
            let (got, want) = (to_float(t.log2(n)), (n as f64).log2());
            assert!((got - want).abs() < 5e-5, "log2 of {n}: {got}, not {want}");
        }
        for i in -57_000..57_000 {
            let x = f64::from(i) * 0.0173;
            let off = t.exp2(from(x)) / to_float(from(x)).exp2() - 1.0;
            assert!(off.abs() < 6e-5, "2^{x}: off by {off}");
        }
        assert_eq!((t.log2(0), t.log2(1), t.log2(u64::MAX) / ONE), (0, 0, 63));
        for x in [i32::MIN, -1, i32::MAX] {
            assert!(t.exp2(x) > 0.0 && t.exp2(x).is_finite());
        }
        assert_eq!((from(f64::NAN), from(f64::INFINITY), from(-1e300)), (0, i32::MAX, i32::MIN));
    }
}
