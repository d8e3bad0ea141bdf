"""Adds the shipped configs to the wheel; pyproject.toml contains all other settings."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies configs/ to maxlm/shipped_configs (see `maxlm.config.loading.shipped_configs`)."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree('configs', f'{self.build_lib}/maxlm/shipped_configs')


setup(cmdclass={'build_py': BuildWithConfigs})
