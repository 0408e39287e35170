"""Does a method compute the reference's clipped gradient?"""
