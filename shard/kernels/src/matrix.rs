//! A weight matrix, packed for streaming.

use half::bf16;

use crate::buffer::{Buffer, Touch};
use crate::quantised::{BlockType, QuantisedPanels};

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    F32,
    Bf16,
}

impl Storage {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Storage::F32 => 4,
            Storage::Bf16 => 2,
        }
    }
}

/// Outputs of one panel.
pub(crate) const PANEL: usize = 32;

/// A weight `[outputs, inputs]`, packed for streaming (panels of 32 outputs). Zero at first.
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    panels: Panels,
}

/// The numbers; the layouts are in the crate's documentation. Outputs are padded with zeros to whole
/// panels, `bf16` inputs to whole pairs.
pub(crate) enum Panels {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
    /// Blocks of a GGUF file.
    Quantised(QuantisedPanels),
    /// Matrices of the same inputs, their outputs one after the other.
    Stacked(Vec<Matrix>),
}

impl Matrix {
    pub fn new(outputs: usize, inputs: usize, storage: Storage) -> Self {
        let rows = outputs.next_multiple_of(PANEL);
        let panels = match storage {
            Storage::F32 => Panels::F32(Buffer::zeroed(rows * inputs, Touch::Whole)),
            Storage::Bf16 => {
                let inputs = inputs.next_multiple_of(2);
                Panels::Bf16(Buffer::zeroed(rows * inputs, Touch::Whole))
            }
        };
        Self { outputs, inputs, panels }
    }

    /// A matrix that keeps the blocks of a GGUF file. Rows are stored by [`Matrix::set_blocks`].
    ///
    /// # Panics
    /// If `inputs` are no whole blocks.
    pub fn quantised(outputs: usize, inputs: usize, block: BlockType) -> Self {
        let panels = Panels::Quantised(QuantisedPanels::new(outputs, inputs, block));
        Self { outputs, inputs, panels }
    }

    /// Several matrices of the same inputs as one, each stored in its own way.
    ///
    /// # Panics
    /// If the inputs differ.
    pub fn stacked(parts: Vec<Self>) -> Self {
        let inputs = parts.first().map_or(0, Self::inputs);
        for part in &parts {
            assert!(part.inputs == inputs, "{} inputs over {inputs}", part.inputs);
        }
        let outputs = parts.iter().map(Self::outputs).sum();
        Self { outputs, inputs, panels: Panels::Stacked(parts) }
    }

    /// Stores output row `output` as the blocks of its type.
    ///
    /// # Panics
    /// If the matrix is not quantised, or `output` or the row's length is out of range.
    pub fn set_blocks(&mut self, output: usize, blocks: &[u8]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        match &mut self.panels {
            Panels::Quantised(panels) => panels.set_row(output, blocks),
            _ => panic!("blocks for a matrix that has none"),
        }
    }

    /// Stores output row `output` (`inputs` long), rounding to nearest even where the storage is
    /// narrower. Loading calls this once for each row.
    ///
    /// # Panics
    /// If `output` or the row's length is out of range, or the matrix is quantised or stacked.
    pub fn set_row(&mut self, output: usize, row: &[f32]) {
        let start = self.start(output, row.len());
        match &mut self.panels {
            Panels::F32(w) => {
                for (slot, &value) in w[start..].iter_mut().step_by(PANEL).zip(row) {
                    *slot = value;
                }
            }
            Panels::Bf16(w) => {
                for (i, &value) in row.iter().enumerate() {
                    w[start + bf16_offset(i)] = bf16::from_f32(value);
                }
            }
            Panels::Quantised(_) | Panels::Stacked(_) => panic!("numbers for a matrix of blocks"),
        }
    }

    /// Reads output row `output` back, as an embedding look-up does.
    ///
    /// # Panics
    /// If `output` or the row's length is out of range.
    pub fn row(&self, output: usize, row: &mut [f32]) {
        let start = self.start(output, row.len());
        match &self.panels {
            Panels::F32(w) => {
                for (value, &stored) in row.iter_mut().zip(w[start..].iter().step_by(PANEL)) {
                    *value = stored;
                }
            }
            Panels::Bf16(w) => {
                for (i, value) in row.iter_mut().enumerate() {
                    *value = w[start + bf16_offset(i)].to_f32();
                }
            }
            Panels::Quantised(panels) => panels.row(output, row),
            Panels::Stacked(parts) => {
                let mut output = output;
                for part in parts {
                    if output < part.outputs {
                        return part.row(output, row);
                    }
                    output -= part.outputs;
                }
            }
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Memory held, padding included.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(w) => size_of_val::<[f32]>(w),
            Panels::Bf16(w) => size_of_val::<[bf16]>(w),
            Panels::Quantised(panels) => panels.bytes(),
            Panels::Stacked(parts) => parts.iter().map(Self::bytes).sum(),
        }
    }

    pub(crate) fn panels(&self) -> &Panels {
        &self.panels
    }

    /// Where input 0 of `output` lies (0 if there are no inputs).
    fn start(&self, output: usize, row_len: usize) -> usize {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert!(row_len == self.inputs, "row of {row_len} values, inputs are {}", self.inputs);
        if row_len == 0 {
            return 0;
        }
        let (panel, lane) = (output / PANEL, output % PANEL);
        match self.panels {
            Panels::F32(_) => panel * PANEL * self.inputs + lane,
            Panels::Bf16(_) => panel * PANEL * self.inputs.next_multiple_of(2) + 2 * lane,
            Panels::Quantised(_) | Panels::Stacked(_) => 0, // they find their own places
        }
    }
}

/// Where input `i` lies from input 0 of the same output.
fn bf16_offset(i: usize) -> usize {
    i / 2 * 2 * PANEL + i % 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(output: usize, input: usize) -> f32 {
        (output * 31 + input) as f32 * 0.37 - 3.0
    }

    fn check(outputs: usize, inputs: usize, storage: Storage) {
        let mut w = Matrix::new(outputs, inputs, storage);
        assert_eq!((w.outputs(), w.inputs()), (outputs, inputs));
        assert!(w.bytes() >= outputs * inputs * storage.bytes());
        for output in 0..outputs {
            let row: Vec<f32> = (0..inputs).map(|input| value(output, input)).collect();
            w.set_row(output, &row);
        }
        for output in (0..outputs).rev() {
            let mut row = vec![f32::NAN; inputs];
            w.row(output, &mut row);
            for (input, &got) in row.iter().enumerate() {
                let want = match storage {
                    Storage::F32 => value(output, input),
                    Storage::Bf16 => bf16::from_f32(value(output, input)).to_f32(),
                };
                assert_eq!(got, want, "{outputs}x{inputs} {storage:?} at {output},{input}");
            }
        }
    }

    #[test]
    fn rows_read_back() {
        for storage in [Storage::F32, Storage::Bf16] {
            for (outputs, inputs) in [(1, 1), (31, 3), (32, 8), (33, 7), (70, 64), (0, 5), (5, 0)] {
                check(outputs, inputs, storage);
            }
        }
    }

    #[test]
    #[should_panic(expected = "output 4 of 4")]
    fn a_row_outside_is_refused() {
        Matrix::new(4, 4, Storage::F32).set_row(4, &[0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "row of 3 values, inputs are 4")]
    fn a_short_row_is_refused() {
        Matrix::new(4, 4, Storage::Bf16).row(0, &mut [0.0; 3]);
    }
}
