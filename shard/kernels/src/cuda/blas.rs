//! Matrix products by cuBLASLt.

use std::{collections::HashMap, ptr, rc::Rc, sync::Arc};

use cudarc::cublaslt::{result, sys as lt};

use super::{
    context::Context,
    error::CudaError,
    memory::Memory,
    product::{Gated, Product},
    stream::Stream,
    tensor::{Element, Matrix, Tensor},
};

const WORKSPACE_BYTES: usize = 32 << 20;
/// More than the second-level cache of any GPU: written between measured runs.
pub(super) const FLUSH_BYTES: usize = 128 << 20;
/// cuBLASLt's proposals that are tried.
const ALGORITHMS: usize = 8;
/// Plans kept; rows of prefill steps differ from step to step.
const PLANS_MAX: usize = 4096;
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) rows: usize,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) element: Element,
    pub(super) out: Element,
}

/// cuBLASLt's description of one product.
pub(super) struct Plan {
    product: lt::cublasLtMatmulDesc_t,
    weights: lt::cublasLtMatrixLayout_t,
    inputs: lt::cublasLtMatrixLayout_t,
    outputs: lt::cublasLtMatrixLayout_t,
    pub(super) algorithms: Vec<lt::cublasLtMatmulAlgo_t>,
}

// SAFETY: descriptions, which do not change once they are made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Blas::plan`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.weights, self.inputs, self.outputs] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

pub(super) struct Blas {
    handle: lt::cublasLtHandle_t,
    workspace: Memory,
    plans: HashMap<Key, Rc<Plan>>,
    pub(super) products: HashMap<Key, Product>,
    pub(super) gated: HashMap<Key, Gated>,
    /// Taken at the start: a step allocates nothing.
    pub(super) flush: Memory,
}

// SAFETY: descriptors and handle are used by one thread at a time, through `&mut Stream`.
unsafe impl Send for Blas {}

fn blas_error(call: &'static str) -> impl FnOnce(result::CublasError) -> CudaError {
    move |error| CudaError::Blas { call, text: error.to_string() }
}

fn data_type(element: Element) -> lt::cudaDataType {
    match element {
        Element::F32 => lt::cudaDataType::CUDA_R_32F,
        Element::Bf16 => lt::cudaDataType::CUDA_R_16BF,
    }
}

impl Blas {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        // SAFETY: only looks for the library.
        if !unsafe { lt::is_culib_present() } {
            return Err(CudaError::NoLibrary { library: "cuBLASLt (libcublasLt.so)", major: 13 });
        }
        let handle = result::create_handle().map_err(blas_error("cublasLtCreate"))?;
        Ok(Self {
            handle,
            workspace: Memory::new(context, WORKSPACE_BYTES, "cuBLASLt")?,
            plans: HashMap::new(),
            products: HashMap::new(),
            gated: HashMap::new(),
            flush: Memory::new(context, FLUSH_BYTES, "measuring")?,
        })
    }

    /// Row-major `out = x · wᵀ` is column-major `outᵀ = w · xᵀ`. The algorithms are those of the plan for
    /// `class`, a like product of as many rows or more.
    pub(super) fn plan(&mut self, key: Key, class: Key) -> Result<Rc<Plan>, CudaError> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let layout = |element, rows: usize, columns: usize| {
            result::create_matrix_layout(
                data_type(element),
                rows as u64,
                columns as u64,
                rows as i64,
            )
            .map_err(blas_error("cublasLtMatrixLayoutCreate"))
        };
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = Plan {
            product: result::create_matmul_desc(compute, lt::cudaDataType::CUDA_R_32F)
                .map_err(blas_error("cublasLtMatmulDescCreate"))?,
            weights: layout(key.element, key.inputs, key.outputs)?,
            inputs: layout(key.element, key.inputs, key.rows)?,
            outputs: layout(key.out, key.outputs, key.rows)?,
            algorithms: Vec::new(),
        };
        let transposed: i32 = 1; // CUBLAS_OP_T
        // SAFETY: a live descriptor; the attribute is an enum of 32 bits.
        unsafe {
            let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            let value = ptr::from_ref(&transposed).cast();
            result::set_matmul_desc_attribute(
                plan.product,
                attribute,
                value,
                size_of_val(&transposed),
            )
            .map_err(blas_error("cublasLtMatmulDescSetAttribute"))?;
        }
        plan.algorithms = self.algorithms(&plan)?;
        if key != class {
            let first = plan.algorithms.first().copied();
            let of_class = self.plan(class, class)?;
            let usable = |algorithm| self.can_do(&plan, &algorithm).then_some(algorithm).or(first);
            plan.algorithms = of_class.algorithms.iter().copied().filter_map(usable).collect();
        }
        if self.plans.len() >= PLANS_MAX {
            self.plans.clear();
        }
        let plan = Rc::new(plan);
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }

    fn algorithms(&self, plan: &Plan) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CudaError> {
        let preference =
            result::create_matmul_pref().map_err(blas_error("cublasLtMatmulPreferenceCreate"))?;
        let attribute =
            lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: all-zero bytes are a valid value of this plain C structure.
        let mut found: [lt::cublasLtMatmulHeuristicResult_t; ALGORITHMS] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: live descriptors; the output has room for as many results as are asked for.
        let code = unsafe {
            let bytes = WORKSPACE_BYTES;
            let value = ptr::from_ref(&bytes).cast();
            let set =
                result::set_matmul_pref_attribute(preference, attribute, value, size_of::<usize>());
            let code = lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.product,
                plan.weights,
                plan.inputs,
                plan.outputs,
                plan.outputs,
                preference,
                ALGORITHMS as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            let _ = result::destroy_matmul_pref(preference);
            set.and(code.result())
        };
        code.map_err(blas_error("cublasLtMatmulAlgoGetHeuristic"))?;
        let found = found[..count as usize].iter();
        let usable =
            found.filter(|result| result.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(usable.map(|result| result.algo).collect())
    }

    /// Whether an algorithm does a product that it was not proposed for.
    fn can_do(&self, plan: &Plan, algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: all-zero bytes are a valid value of this plain C structure.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: live descriptors and a plain output.
        let code = unsafe {
            lt::cublasLtMatmulAlgoCheck(
                self.handle,
                plan.product,
                plan.weights,
                plan.inputs,
                plan.outputs,
                plan.outputs,
                algorithm,
                &mut found,
            )
        };
        code == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE_BYTES
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Stream {
    /// `out = x · wᵀ` by one of the plan's algorithms; shapes were checked.
    pub(super) fn blas_product(
        &mut self,
        algorithm: usize,
        (key, class): (Key, Key),
        (x, w): (&Tensor, &Matrix),
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let plan = self.blas.plan(key, class)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the descriptors say what the tensors are, whose shapes were checked; the workspace
        // is used by this stream alone.
        unsafe {
            let (w, x) = (w.memory.address(), x.memory.address());
            let target = out.memory.address();
            result::matmul(
                self.blas.handle,
                plan.product,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                w as *const _,
                plan.weights,
                x as *const _,
                plan.inputs,
                target as *const _,
                plan.outputs,
                target as *mut _,
                plan.outputs,
                &plan.algorithms[algorithm],
                self.blas.workspace.address() as *mut _,
                WORKSPACE_BYTES,
                self.raw.cast(),
            )
            .map_err(blas_error("cublasLtMatmul"))?;
        }
        Ok(())
    }
}
