//! Element-wise steps: residual and bias additions, gated activations.

use super::KernelError;
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::lanes::{LANES, Lanes};
use super::math::{exp, load_part, soft_cap, store_part};

/// x += y, element by element.
///
/// # Errors
/// If the lengths differ.
pub fn add(cpu: &Cpu, x: &mut [f32], y: &[f32]) -> Result<(), KernelError> {
    KernelError::check("length of an addition's second term", x.len(), y.len())?;
    dispatch::run(cpu, Add { x, y });
    Ok(())
}

/// Adds `bias` to every row of `x`, whose rows are as long as `bias`.
///
/// # Errors
/// If `x` is not made of such rows.
pub fn add_bias(cpu: &Cpu, x: &mut [f32], bias: &[f32]) -> Result<(), KernelError> {
    check_rows("length of the last row a bias is added to", x.len(), bias.len())?;
    for row in x.chunks_exact_mut(bias.len().max(1)) {
        dispatch::run(cpu, Add { x: row, y: bias });
    }
    Ok(())
}

/// x += factor * y, element by element, the product rounded before it is added.
///
/// # Errors
/// If the lengths differ.
pub fn add_scaled(cpu: &Cpu, x: &mut [f32], y: &[f32], factor: f32) -> Result<(), KernelError> {
    KernelError::check("length of an addition's second term", x.len(), y.len())?;
    dispatch::run(cpu, AddScaled { x, y, factor });
    Ok(())
}

/// x = factor * x, and if there is a cap, x = cap * tanh(x / cap), element by element.
pub fn scale_and_cap(cpu: &Cpu, x: &mut [f32], factor: f32, cap: Option<f32>) {
    dispatch::run(cpu, ScaleAndCap { x, factor, cap });
}

/// x = 1 / (1 + e^-x), element by element.
pub fn sigmoid(cpu: &Cpu, x: &mut [f32]) {
    dispatch::run(cpu, Sigmoid { x });
}

/// gate = silu(gate) * up, with silu(g) = g / (1 + e^-g).
///
/// # Errors
/// If the lengths differ.
pub fn silu_mul(cpu: &Cpu, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    KernelError::check("length of a gated activation's second factor", gate.len(), up.len())?;
    dispatch::run(
        cpu,
        GatedActivation {
            gate,
            up,
            activation: Activation::Silu,
        },
    );
    Ok(())
}

/// gate = gelu(gate) * up, with the tanh form of gelu: g / (1 + e^(-2 u)), u = sqrt(2/pi) (g + 0.044715 g^3).
///
/// # Errors
/// If the lengths differ.
pub fn gelu_tanh_mul(cpu: &Cpu, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    KernelError::check("length of a gated activation's second factor", gate.len(), up.len())?;
    dispatch::run(
        cpu,
        GatedActivation {
            gate,
            up,
            activation: Activation::GeluTanh,
        },
    );
    Ok(())
}

/// An error unless `len` is a multiple of `row`.
pub(super) fn check_rows(what: &'static str, len: usize, row: usize) -> Result<(), KernelError> {
    match len.checked_rem(row) {
        Some(0) => Ok(()),
        Some(found) => Err(KernelError::Shape {
            what,
            expected: row,
            found,
        }),
        None => KernelError::check(what, 0, len),
    }
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

struct AddScaled<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    factor: f32,
}

impl Kernel for AddScaled<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += self.factor * y;
        }
    }
}

struct ScaleAndCap<'a> {
    x: &'a mut [f32],
    factor: f32,
    cap: Option<f32>,
}

impl Kernel for ScaleAndCap<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        for at in (0..self.x.len()).step_by(LANES) {
            let mut v: S = load_part::<S>(self.x, at).mul(S::splat(self.factor));
            if let Some(cap) = self.cap {
                v = soft_cap(v, cap, -2.0 / cap);
            }
            store_part(v, self.x, at);
        }
    }
}

struct Sigmoid<'a> {
    x: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let one = S::splat(1.0);
        for at in (0..self.x.len()).step_by(LANES) {
            let power = exp(S::splat(0.0).sub(load_part(self.x, at)));
            store_part(one.div(one.add(power)), self.x, at);
        }
    }
}

/// What is applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// See [`silu_mul`].
    Silu,
    /// See [`gelu_tanh_mul`].
    GeluTanh,
}

struct GatedActivation<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    activation: Activation,
}

impl Kernel for GatedActivation<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        for at in (0..self.gate.len()).step_by(LANES) {
            let activated = activated::<S>(load_part(self.gate, at), self.activation);
            store_part(activated.mul(load_part(self.up, at)), self.gate, at);
        }
    }
}

/// out = activation(gate) * up.
#[inline(always)]
pub(super) fn gated<S: Lanes>(gate: &[f32], up: &[f32], activation: Activation, out: &mut [f32]) {
    for at in (0..gate.len()).step_by(LANES) {
        let activated = activated::<S>(load_part(gate, at), activation);
        store_part(activated.mul(load_part(up, at)), out, at);
    }
}

#[inline(always)]
fn activated<S: Lanes>(g: S, activation: Activation) -> S {
    let exponent = match activation {
        Activation::Silu => S::splat(0.0).sub(g),
        Activation::GeluTanh => {
            // -2 sqrt(2/pi) (g + 0.044715 g^3) = g (a + b g^2)
            let (a, b) = (S::splat(-1.595_769_2), S::splat(-0.071_354_814));
            g.mul(g.mul(g).fma(b, a))
        }
    };
    g.div(S::splat(1.0).add(exp(exponent)))
}
