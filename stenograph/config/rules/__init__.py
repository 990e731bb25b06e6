"""The passes, one file a topic. Their order here is the declared order: what others depend on comes first."""

from stenograph.config.rules import model  # isort: skip
from stenograph.config.rules import parallel  # isort: skip
from stenograph.config.rules import speculation  # isort: skip
from stenograph.config.rules import attention  # isort: skip
from stenograph.config.rules import pages  # isort: skip
from stenograph.config.rules import scheduling  # isort: skip
from stenograph.config.rules import graphs  # isort: skip
from stenograph.config.rules import memory  # isort: skip

__all__ = ["attention", "graphs", "memory", "model", "pages", "parallel", "scheduling", "speculation"]
