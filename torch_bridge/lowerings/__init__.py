"""Lowerings of torch operators, one file a family; importing this package registers them all."""

from torch_bridge.lowerings import activation as activation
from torch_bridge.lowerings import attention as attention
from torch_bridge.lowerings import bessel as bessel
from torch_bridge.lowerings import convolution as convolution
from torch_bridge.lowerings import creation as creation
from torch_bridge.lowerings import elementwise as elementwise
from torch_bridge.lowerings import experts as experts
from torch_bridge.lowerings import fft as fft
from torch_bridge.lowerings import histogram as histogram
from torch_bridge.lowerings import indexing as indexing
from torch_bridge.lowerings import linalg as linalg
from torch_bridge.lowerings import loss as loss
from torch_bridge.lowerings import matmul as matmul
from torch_bridge.lowerings import normalisation as normalisation
from torch_bridge.lowerings import pooling as pooling
from torch_bridge.lowerings import prims as prims
from torch_bridge.lowerings import random as random
from torch_bridge.lowerings import recurrent as recurrent
from torch_bridge.lowerings import reduction as reduction
from torch_bridge.lowerings import scatter as scatter
from torch_bridge.lowerings import shape as shape
from torch_bridge.lowerings import sorting as sorting
from torch_bridge.lowerings import special as special
from torch_bridge.lowerings import uneven_pooling as uneven_pooling
