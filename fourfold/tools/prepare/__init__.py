"""Raw text to token files: `fourfold data prepare` and `fourfold data train-tokenizer`.

input_files   which files hold the text, and their lines
documents     the documents of a file, in chunks
work_shards   chunks tokenized by worker processes
writers       token files in any of the three formats
manifest      settings, the plan of unfinished work, counts, the manifest
pipeline      all of these in order
corpus        the text every Python installation carries
"""
